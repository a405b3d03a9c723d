"""Score reports in buckets: published directly, or sealed: first only the hash, later the report.

If a validator publishes its scores before the weights that follow from them are in force, other validators can copy the
weights and earn from them. The hash commits the validator: a reader refuses a report whose hash is not the published
one.
"""

from tplr.errors import ObjectNotFound, PayloadError, PreconditionFailed, ScoresSealed
from tplr.exchange.documents import get_document, get_signed, put_document
from tplr.exchange.envelope import Author, Signer, body_sha256
from tplr.hparams import HParams
from tplr.keys import scores_key, scores_seal_key
from tplr.schemas import ScoreReport, ScoreSeal
from tplr.storage import ObjectStore


def released_after(hparams: HParams) -> int:
    """Return the number of windows after which a report is published in any case.

    Everything that an audit of the report needs is still kept then.
    """
    return max(1, hparams.gradient_retention_windows - 2 * hparams.pay_windows)


def seal_of(report: ScoreReport, *, weights_due: int) -> ScoreSeal:
    """Return the document that is published for a report while it is sealed."""
    return ScoreSeal(window=report.window, uid=report.uid, sha256=body_sha256(report), weights_due=weights_due)


async def put_scores(store: ObjectStore, report: ScoreReport, signer: Signer) -> None:
    """Publish a report. Raises StoreError."""
    key = scores_key(report.window, signer.uid, signer.run.version)
    await put_document(store, key, report, window=report.window, signer=signer)


async def put_seal(store: ObjectStore, seal: ScoreSeal, signer: Signer) -> None:
    """Publish a seal, once for a window.

    Raises:
        PreconditionFailed: a seal with another hash exists.
        StoreError: the seal is not published.
    """
    key = scores_seal_key(seal.window, signer.uid, signer.run.version)
    try:
        await put_document(store, key, seal, window=seal.window, signer=signer, create_only=True)
    except PreconditionFailed:
        there = await _seal(store, seal.window, signer)
        if there is None or there.sha256 != seal.sha256:
            raise


async def get_scores(store: ObjectStore, window: int, author: Author, hparams: HParams) -> ScoreReport:
    """Read a validator's observations and scores of a window.

    Raises:
        ScoresSealed: only their hash is published so far.
        PayloadError: the object is not a score report of ``author``, its hash is not the published one, or it has more
            own-pages tests than a window.
        StoreError: as ``ObjectStore.get``.
    """
    key = scores_key(window, author.uid, author.run.version)
    seal = await _seal(store, window, author) if hparams.sealed_scores else None
    try:
        found = await get_signed(store, key, ScoreReport, window=window, author=author, retry=True)
    except ObjectNotFound:
        if seal is None:
            raise
        raise ScoresSealed(_when_readable(seal, hparams), bucket=store.name, key=key) from None
    if seal and found.sha256 != seal.sha256:
        raise PayloadError(f"{key}: its hash differs from the one published before ({seal.sha256[:12]}…)")
    if hparams.sealed_scores and seal is None:
        raise PayloadError(f"{key}: its hash was not published before")
    _check_tests(found.document, hparams, key)
    return found.document


def _check_tests(report: ScoreReport, hparams: HParams, key: str) -> None:
    """Raise PayloadError for more own-pages tests than a window has: each takes time, a report may have hundreds."""
    tested = sum(bool(seen.assigned_products) for seen in report.observations.values())
    if tested > hparams.uids_per_window:
        expected = f"expected at most uids_per_window {hparams.uids_per_window}"
        raise PayloadError(f"{key}: {tested} own-pages tests, {expected}")


async def _seal(store: ObjectStore, window: int, author: Author) -> ScoreSeal | None:
    key = scores_seal_key(window, author.uid, author.run.version)
    try:
        return await get_document(store, key, ScoreSeal, window=window, author=author, retry=True)
    except ObjectNotFound:
        return None


def _when_readable(seal: ScoreSeal, hparams: HParams) -> str:
    return (
        f"the scores of window {seal.window} are sealed until the weights that follow from them are in force: they are "
        f"due in window {seal.weights_due}, and the scores are readable by window "
        f"{seal.window + released_after(hparams)} at the latest"
    )

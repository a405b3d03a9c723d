"""Score reports in buckets: in the clear, or first their hash alone, and their content later.

A validator that publishes its scores before the weights that follow from them are in force pays those who copy weights.
The hash binds it meanwhile: a reader refuses content that another hash was published for.
"""

import hashlib

from tplr.errors import ObjectNotFound, PayloadError, PreconditionFailed, ScoresSealed
from tplr.exchange.documents import READ_SECONDS, get_document, put_document
from tplr.hparams import HParams
from tplr.keys import scores_key, scores_seal_key
from tplr.schemas import ScoreReport, ScoreSeal
from tplr.storage import ObjectStore
from tplr.storage.retry import with_retry
from tplr.untrusted import parse_untrusted


def released_after(hparams: HParams) -> int:
    """Windows after which a report is published in any case: as long as all that an audit of it needs is kept."""
    return max(1, hparams.gradient_retention_windows - 2 * hparams.pay_windows)


def seal_of(report: ScoreReport, *, weights_due: int) -> ScoreSeal:
    """What is published of a report while it is sealed."""
    sha256 = hashlib.sha256(report.model_dump_json().encode()).hexdigest()
    return ScoreSeal(window=report.window, uid=report.uid, sha256=sha256, weights_due=weights_due)


async def put_seal(store: ObjectStore, seal: ScoreSeal, version: str) -> None:
    """Publish a seal, once for a window.

    Raises:
        PreconditionFailed: there is one of another hash.
        StoreError: it is not published.
    """
    key = scores_seal_key(seal.window, seal.uid, version)
    try:
        await put_document(store, key, seal, create_only=True)
    except PreconditionFailed:
        if (await get_document(store, key, ScoreSeal, retry=True)).sha256 != seal.sha256:
            raise


async def get_scores(store: ObjectStore, window: int, uid: int, hparams: HParams) -> ScoreReport:
    """Validator ``uid``'s observations and scores of a window.

    Raises:
        ScoresSealed: only their hash is published yet.
        PayloadError: the object is no score report, or not the one whose hash was published.
        StoreError: as ``ObjectStore.get``.
    """
    key = scores_key(window, uid, hparams.version)
    seal = await _seal(store, window, uid, hparams) if hparams.sealed_scores else None
    try:
        body = await with_retry(lambda: store.get(key, max_bytes=ScoreReport.max_bytes), deadline_seconds=READ_SECONDS)
    except ObjectNotFound:
        if seal is None:
            raise
        raise ScoresSealed(_when_readable(seal, hparams), bucket=store.name, key=key) from None
    if seal and hashlib.sha256(body).hexdigest() != seal.sha256:
        raise PayloadError(f"{key}: another hash than the one that was published before ({seal.sha256[:12]}…)")
    if hparams.sealed_scores and seal is None:
        raise PayloadError(f"{key}: no hash of it was published before")
    return parse_untrusted(body, ScoreReport, key)


async def _seal(store: ObjectStore, window: int, uid: int, hparams: HParams) -> ScoreSeal | None:
    try:
        return await get_document(store, scores_seal_key(window, uid, hparams.version), ScoreSeal, retry=True)
    except ObjectNotFound:
        return None


def _when_readable(seal: ScoreSeal, hparams: HParams) -> str:
    return (
        f"the scores of window {seal.window} are sealed until the weights that follow from them are in force: they are "
        f"due in window {seal.weights_due}, and the scores are readable by window "
        f"{seal.window + released_after(hparams)} at the latest"
    )

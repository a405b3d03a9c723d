"""Score reports in buckets: sealed ones are readable later; readers refuse what was not sealed, or takes too long."""

import hashlib

import pytest
from reports import score_report
from signers import signer

from tplr.errors import ObjectNotFound, PayloadError, PreconditionFailed, ScoresSealed
from tplr.exchange.scores import get_scores, put_scores, put_seal, released_after, seal_of
from tplr.hparams import load_hparams
from tplr.keys import scores_key, scores_seal_key
from tplr.schemas import Alignment, PeerObservation, ScoreReport
from tplr.storage import MemoryStore

HPARAMS = load_hparams().model_copy(update={"gradient_retention_windows": 100, "pay_windows": 20})
WINDOW, UID = 70, 3
ME = signer(UID, version=HPARAMS.version)
REPORT = score_report(WINDOW, uid=UID, weights={"1": 1 / 3, "2": 2 / 3}, salt="ab" * 32).sealed()


async def published(report: ScoreReport | None, *, sealed: bool = True) -> MemoryStore:
    store = MemoryStore("validator")
    if sealed:
        await put_seal(store, seal_of(REPORT, weights_due=90), ME)
    if report:
        await put_scores(store, report, ME)
    return store


async def test_the_seal_is_the_hash_of_the_body_that_are_published_later() -> None:
    store = await published(REPORT)
    _, body = (await store.get(scores_key(WINDOW, UID, HPARAMS.version), max_bytes=2**20)).split(b"\n")
    assert seal_of(REPORT, weights_due=90).sha256 == hashlib.sha256(body).hexdigest()
    assert await get_scores(store, WINDOW, ME, HPARAMS) == REPORT


async def test_until_then_the_error_says_when_it_will_be_readable() -> None:
    with pytest.raises(ScoresSealed) as refused:
        await get_scores(await published(None), WINDOW, ME, HPARAMS)
    assert "due in window 90, and the scores are readable by window 130 at the latest" in str(refused.value)
    assert released_after(HPARAMS) == 60
    with pytest.raises(ObjectNotFound) as missing:
        await get_scores(MemoryStore("empty"), WINDOW, ME, HPARAMS)
    assert not isinstance(missing.value, ScoresSealed)


async def test_other_content_than_was_sealed_is_refused() -> None:
    for change in ({"weights": {"1": 1.0}}, {"salt": "cd" * 32}, {"faults": ("chain",)}):
        store = await published(REPORT.model_copy(update=change).sealed())
        with pytest.raises(PayloadError, match="its hash differs from the one published before"):
            await get_scores(store, WINDOW, ME, HPARAMS)
    with pytest.raises(PayloadError, match="its hash was not published before"):
        await get_scores(await published(REPORT, sealed=False), WINDOW, ME, HPARAMS)


async def test_in_the_clear_there_is_no_seal() -> None:
    clear = HPARAMS.model_copy(update={"sealed_scores": False})
    assert await get_scores(await published(REPORT, sealed=False), WINDOW, ME, clear) == REPORT


def with_tests(number: int) -> ScoreReport:
    tested = PeerObservation(hotkey="somebody", sampled=True, assigned_products=(1.0,))
    return score_report(
        WINDOW,
        uid=UID,
        observations={str(uid): tested for uid in range(number)} | {"900": PeerObservation(hotkey="another")},
        alignment=Alignment(uids=(0,), products=(1.0,), norms=(1.0,), gram=(1.0,)),
    ).sealed()


async def test_a_report_has_no_more_own_pages_tests_than_a_window() -> None:
    """Each test of each update takes time: a megabyte of them would take a reader half an hour."""
    clear, most = HPARAMS.model_copy(update={"sealed_scores": False}), HPARAMS.uids_per_window
    full = with_tests(most)
    assert await get_scores(await published(full, sealed=False), WINDOW, ME, clear) == full
    store = await published(with_tests(most + 1), sealed=False)
    with pytest.raises(PayloadError, match=f"{most + 1} own-pages tests, expected at most uids_per_window {most}"):
        await get_scores(store, WINDOW, ME, clear)


async def test_a_window_is_sealed_once() -> None:
    store = await published(None)
    key = scores_seal_key(WINDOW, UID, HPARAMS.version)
    before = await store.head(key)
    await put_seal(store, seal_of(REPORT, weights_due=95), ME)  # the same report, after a restart
    assert (await store.head(key)).etag == before.etag
    other = REPORT.model_copy(update={"salt": ""}).sealed()
    with pytest.raises(PreconditionFailed):
        await put_seal(store, seal_of(other, weights_due=90), ME)

"""A miner that can't prove that it holds the network's model is out of sync, for every kind of failure."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from tplr.errors import AccessDenied, StoreUnavailable
from tplr.exchange.aggregates import IncludedSet
from tplr.exchange.documents import put_document
from tplr.exchange.quorum import void
from tplr.keys import debug_key
from tplr.localnet.attackers import Honest
from tplr.localnet.simulation import World, profile, small
from tplr.node import sync_proofs
from tplr.node.observation import Observation
from tplr.node.state import StateFolder
from tplr.node.sync_proofs import SyncProofs
from tplr.schemas import OUT_OF_SYNC, UNREAD, PeerObservation

UIDS = (1, 2, 3)
NEWEST = 3


@pytest.fixture(scope="module")
def lived() -> World:
    hparams = small(profile("demo"), pages_per_window=1, evaluation_sequences=8, uids_per_window=1, probation_windows=0)
    world = World(hparams, [Honest(4), Honest(4), Honest(4)])
    asyncio.run(world.run(NEWEST))
    return world


@pytest.fixture
def world(lived: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world with buckets restored to their content after the last window, for any previous test."""
    for uid in UIDS:
        store = lived.by_uid[uid].store
        monkeypatch.setattr(store, "_objects", dict(store._objects))
    return lived


def proofs_of(world: World) -> SyncProofs:
    return SyncProofs(world.train_state, cast(Any, world.comms), world.hparams)


async def found(world: World, proofs: SyncProofs | None = None) -> list[int | None]:
    """Return the observed number of steps that each uid is behind after the last window."""
    seen = Observation(NEWEST + 1, {uid: PeerObservation(hotkey=world.by_uid[uid].hotkey) for uid in UIDS})
    await (proofs or proofs_of(world)).note(seen, UIDS)
    return [seen.observations[uid].behind for uid in UIDS]


def key_of(world: World, uid: int, window: int = NEWEST) -> str:
    return debug_key(window, uid, world.hparams.version)


def fails(world: World, monkeypatch: pytest.MonkeyPatch, uids: tuple[int, ...], error: Exception) -> None:
    """Make reads of the reports in these buckets fail."""

    async def get(*_: object, **__: object) -> bytes:
        raise error

    for uid in uids:
        monkeypatch.setattr(world.by_uid[uid].store, "get", get)


async def test_true_proofs(world: World) -> None:
    assert await found(world) == [0, 0, 0]


@pytest.mark.parametrize(
    "body",
    [b" " * (2**20 + 1), b"", b"{", b'{"window": 3}', b"[" * 5000, b"\xff" * 100],
    ids=["above 1 MiB", "empty", "cut off", "another document", "deep", "no text"],
)
async def test_a_report_that_is_none_is_out_of_sync(world: World, body: bytes) -> None:
    await world.by_uid[2].store.put(key_of(world, 2), body)
    assert await found(world) == [0, OUT_OF_SYNC, 0]


async def test_a_bucket_that_refuses_is_as_good_as_out_of_sync(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(world, monkeypatch, (1,), AccessDenied("no"))
    assert await found(world) == [UNREAD, 0, 0]
    fails(world, monkeypatch, UIDS, AccessDenied("no"))  # even if all do
    assert await found(world) == [UNREAD] * 3


async def test_missing_reports_are_out_of_sync(world: World) -> None:
    for window in range(1, NEWEST + 1):
        await world.by_uid[3].store.delete(key_of(world, 3, window))
    assert await found(world) == [0, 0, OUT_OF_SYNC]


@pytest.mark.parametrize("source", [None, 1])
async def test_another_model_or_a_copied_proof_is_out_of_sync(world: World, source: int | None) -> None:
    """Two nodes with the same model have different proofs: one node's proof is useless to another."""
    store = world.by_uid[2].store
    report = await world.comms.get_report(2, NEWEST)
    proof = "f" * 64 if source is None else (await world.comms.get_report(source, NEWEST)).proof
    signer, lie = world.by_uid[2].signer, report.model_copy(update={"proof": proof})
    await put_document(store, key_of(world, 2), lie, window=NEWEST, signer=signer)
    assert await found(world) == [0, OUT_OF_SYNC, 0]


async def test_one_bucket_that_does_not_answer_is_that_miner_s_fault(world: World, monkeypatch) -> None:
    fails(world, monkeypatch, (1,), StoreUnavailable("no network", retry_after=1e6))
    assert await found(world) == [UNREAD, 0, 0]


@pytest.mark.parametrize("uids", [(1, 2), UIDS])
async def test_many_that_do_not_answer_are_this_validator_s_fault(world: World, monkeypatch, uids) -> None:
    fails(world, monkeypatch, uids, StoreUnavailable("no network", retry_after=1e6))
    assert await found(world) == [None if uid in uids else 0 for uid in UIDS]


def hangs(world: World, monkeypatch: pytest.MonkeyPatch, uids: tuple[int, ...]) -> None:
    """Make reads of the reports in these buckets hang."""

    async def get(*_: object, **__: object) -> bytes:
        return await asyncio.get_running_loop().create_future()

    for uid in uids:
        monkeypatch.setattr(world.by_uid[uid].store, "get", get)


async def test_a_bucket_that_is_too_slow_is_that_miner_s_fault(world: World, monkeypatch) -> None:
    monkeypatch.setattr(sync_proofs, "REPORT_SECONDS", 0.1)
    hangs(world, monkeypatch, (1,))
    assert await found(world) == [UNREAD, 0, 0]


async def test_slow_buckets_together_end_in_time_and_who_was_not_asked_is_not_judged(world: World, monkeypatch) -> None:
    monkeypatch.setattr(sync_proofs, "CONCURRENCY", 1)
    monkeypatch.setattr(sync_proofs, "ALL_SECONDS", 0.5)
    hangs(world, monkeypatch, UIDS)
    assert await found(world) == [None, None, None]


async def test_who_was_asked_too_late_to_have_its_time_is_not_judged(world: World, monkeypatch) -> None:
    monkeypatch.setattr(sync_proofs, "ALL_SECONDS", 0.3)
    hangs(world, monkeypatch, (1,))
    assert await found(world) == [None, 0, 0]


async def test_a_model_that_was_rolled_back_judges_nobody(world: World, tmp_path: Path, monkeypatch) -> None:
    """A validator that had diverged does not compare late miners with the proofs of its wrong model."""
    state, proofs = world.train_state, proofs_of(world)
    monkeypatch.setattr(state, "snapshots", StateFolder(tmp_path))
    monkeypatch.setattr(state, "loads", state.loads)
    true = state.save(NEWEST + 1, {})
    next(iter(state.parameters.values())).data.add_(1.0)
    await proofs.note(Observation(NEWEST, {}), UIDS)
    state.restore_shared(true)
    await world.by_uid[2].store.delete(key_of(world, 2))
    assert await found(world, proofs) == [0, None, 0]


async def test_a_miner_that_missed_a_window_is_a_step_behind(world: World) -> None:
    """There is no report of the last window: the previous report shows the previous step, which the validator
    remembers."""
    await world.by_uid[2].store.delete(key_of(world, 2))
    assert await found(world, world._observer._sync) == [0, 1, 0]
    # A validator that has just started does not know the proof of that window.
    assert await found(world) == [0, None, 0]


@pytest.mark.parametrize(
    ("window", "skipped", "judged"),
    [(NEWEST, {}, False), (NEWEST - 1, {}, False), (NEWEST - 2, {}, True), (NEWEST, {"1": "missing"}, True)],
)
async def test_nobody_is_judged_right_after_a_void_window(world: World, monkeypatch, window, skipped, judged) -> None:
    """Miners that did not learn in time that a window was void report the model with their gathered updates."""
    empty = void(window, world.hparams.version).included.model_copy(update={"skipped": skipped})

    async def get_included(asked: int) -> IncludedSet | None:
        return empty if asked == window else None

    monkeypatch.setattr(world.comms, "get_included", get_included)
    await world.by_uid[2].store.put(key_of(world, 2), b"another model's")
    assert await found(world) == ([0, OUT_OF_SYNC, 0] if judged else [None, None, None])


async def test_nothing_is_known_before_the_first_window(world: World) -> None:
    seen = Observation(world.train_state.start_window, {1: PeerObservation(hotkey="1")})
    await proofs_of(world).note(seen, [1])
    assert seen.observations[1].behind is None

"""Who can't prove that it holds the network's model is out of sync, however it fails to."""

import asyncio
from collections.abc import Callable

import pytest

from tplr.errors import AccessDenied, ObjectTooLarge, PayloadError, StoreUnavailable
from tplr.exchange.documents import get_document
from tplr.hparams import load_hparams
from tplr.keys import debug_key
from tplr.localnet.attackers import Honest
from tplr.localnet.plan import PROFILE
from tplr.localnet.simulation import World, small
from tplr.node.observation import Observation
from tplr.node.sync_proofs import SyncProofs
from tplr.schemas import OUT_OF_SYNC, DebugReport, PeerObservation

UIDS = (1, 2, 3)
NEWEST = 3


@pytest.fixture(scope="module")
def lived() -> World:
    hparams = small(load_hparams(PROFILE), pages_per_window=1, evaluation_sequences=8, uids_per_window=1)
    world = World(hparams, [Honest(4), Honest(4), Honest(4)])
    asyncio.run(world.run(NEWEST))
    return world


@pytest.fixture
def world(lived: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("tplr.node.sync_proofs.REPORT_SECONDS", 0.0)
    monkeypatch.setattr(lived, "_proofs", dict(lived._proofs))
    return lived


async def found(world: World) -> dict[int, int | None]:
    """How many steps behind each uid is seen to be, after the last window."""
    proofs = SyncProofs(world.train_state, world.comms, world.hparams)
    seen = Observation(NEWEST + 1, {uid: PeerObservation(hotkey=world.by_uid[uid].hotkey) for uid in UIDS})
    await proofs.note(seen, UIDS)
    return {uid: one.behind for uid, one in seen.observations.items()}


def reports(world: World, monkeypatch: pytest.MonkeyPatch, uids: tuple[int, ...], error: Exception) -> None:
    """Reading the reports of these uids fails."""
    get_report: Callable = world.comms.get_report

    async def report(uid: int, window: int) -> DebugReport:
        if uid in uids:
            raise error
        return await get_report(uid, window)

    monkeypatch.setattr(world.comms, "get_report", report)


async def test_true_proofs(world: World) -> None:
    assert await found(world) == {1: 0, 2: 0, 3: 0}


async def test_a_report_above_1_mib_is_out_of_sync(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real reader of documents, from a bucket that holds too large an object."""
    store, get_report = world.by_uid[2].store, world.comms.get_report
    key = debug_key(NEWEST, 2, world.hparams.version)
    await store.put(key, b" " * (2**20 + 1))

    async def report(uid: int, window: int) -> DebugReport:
        if (uid, window) == (2, NEWEST):
            return await get_document(store, key, DebugReport)
        return await get_report(uid, window)

    monkeypatch.setattr(world.comms, "get_report", report)
    with pytest.raises(ObjectTooLarge):
        await report(2, NEWEST)
    assert await found(world) == {1: 0, 2: OUT_OF_SYNC, 3: 0}


@pytest.mark.parametrize("error", [PayloadError("no DebugReport"), AccessDenied("no"), ObjectTooLarge("2 MiB")])
async def test_no_readable_report_is_out_of_sync(world: World, monkeypatch: pytest.MonkeyPatch, error) -> None:
    reports(world, monkeypatch, (1,), error)
    assert await found(world) == {1: OUT_OF_SYNC, 2: 0, 3: 0}
    reports(world, monkeypatch, UIDS, error)  # even if nobody has one
    assert await found(world) == dict.fromkeys(UIDS, OUT_OF_SYNC)


async def test_missing_reports_are_out_of_sync(world: World) -> None:
    for window in range(1, NEWEST + 1):
        world._proofs.pop((3, window), None)
    assert await found(world) == {1: 0, 2: 0, 3: OUT_OF_SYNC}


async def test_another_model_is_out_of_sync(world: World) -> None:
    world._proofs[2, NEWEST] = "f" * 64
    assert await found(world) == {1: 0, 2: OUT_OF_SYNC, 3: 0}


async def test_one_bucket_that_does_not_answer_is_that_miner_s_fault(world: World, monkeypatch) -> None:
    reports(world, monkeypatch, (1,), StoreUnavailable("no network"))
    assert await found(world) == {1: OUT_OF_SYNC, 2: 0, 3: 0}


@pytest.mark.parametrize("uids", [(1, 2), UIDS])
async def test_many_that_do_not_answer_are_this_validator_s_fault(world: World, monkeypatch, uids) -> None:
    reports(world, monkeypatch, uids, StoreUnavailable("no network"))
    assert await found(world) == {uid: None if uid in uids else 0 for uid in UIDS}


async def test_a_copied_proof_is_none(world: World) -> None:
    """Two nodes that hold the same model prove it differently: what one published is of no use to another."""
    proofs = SyncProofs(world.train_state, world.comms, world.hparams)
    seen = Observation(NEWEST + 1, {})
    await proofs.note(seen, UIDS)
    assert await proofs.behind(1, NEWEST) == 0
    world._proofs[2, NEWEST] = world.proof(1, NEWEST)
    assert await proofs.behind(2, NEWEST) == OUT_OF_SYNC


async def test_a_miner_that_missed_a_window_is_a_step_behind(lived: World, world: World) -> None:
    """No report of the last window: the one before shows the step before, as the validator remembers it."""
    observer = world._observer._sync
    seen = Observation(NEWEST + 1, {uid: PeerObservation(hotkey=str(uid)) for uid in UIDS})
    del world._proofs[2, NEWEST]
    await observer.note(seen, UIDS)
    assert [seen.observations[uid].behind for uid in UIDS] == [0, 1, 0]


async def test_nothing_is_known_before_the_first_window(world: World) -> None:
    seen = Observation(world.train_state.start_window, {1: PeerObservation(hotkey="1")})
    await SyncProofs(world.train_state, world.comms, world.hparams).note(seen, [1])
    assert seen.observations[1].behind is None

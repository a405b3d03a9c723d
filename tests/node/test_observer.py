"""A failure on the validator's own side leaves fields unset and a line in ``faults``, and changes no score."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from tplr.errors import ChainUnavailable, DataError, StoreUnavailable
from tplr.hparams import load_hparams
from tplr.localnet.attackers import Honest, Late
from tplr.localnet.plan import PROFILE
from tplr.localnet.simulation import World, small
from tplr.node.observer import Observation
from tplr.schemas import PeerScore, Reason
from tplr.scoring.board import step

EVERYBODY = {1, 2, 3}


@pytest.fixture(scope="module")
def lived() -> World:
    """Three windows of two honest miners and one that is late; of the last one only the uploads."""
    hparams = small(load_hparams(PROFILE), pages_per_window=2, evaluation_sequences=16, gather_patience_seconds=0.1)
    world = World(hparams, [Honest(8), Honest(4), Late("late", 4)])
    asyncio.run(world.run(2))
    for member in world.members:
        asyncio.run(member.act(world, world.window))
    return world


@pytest.fixture
def world(lived: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """``lived``, whose observer has not seen its last window yet, whatever the test before did."""
    monkeypatch.setattr(lived._observer, "_previous", lived._observer._previous)
    monkeypatch.setattr(lived._observer, "_proofs", dict(lived._observer._proofs))
    return lived


async def observe(world: World) -> tuple[Observation, dict[int, PeerScore]]:
    """What is seen of the last window, and the peer scores after it."""
    gathered = await world.comms.gather_updates(world.peers, world.window, world.spec)
    seen = await world._observer.observe(gathered, world.board.peer_scores)
    return seen, step(world.board.peer_scores, seen.observations, world.window, world.board.hparams).peer_scores


def unmoved(before: PeerScore, after: PeerScore) -> bool:
    """Nothing that evaluations and penalties decide has changed; a penalty may recover."""
    judged = ("mu", "sigma", "binary", "signs", "evaluations", "gradient_score", "gain", "sync", "base")
    same = all(getattr(before, name) == getattr(after, name) for name in judged)
    return same and after.final >= before.final


def fails(error: Exception) -> Callable[..., object]:
    """In the place of a coroutine function."""

    async def call(*_: object, **__: object) -> object:
        raise error

    return call


async def test_without_a_fault_everybody_is_judged(world: World) -> None:
    seen, after = await observe(world)
    assert seen.faults == []
    assert not any(unmoved(world.board.peer_scores[uid], after[uid]) for uid in EVERYBODY)
    assert after[3].multipliers == {"late": pytest.approx(0.75**3)}


@pytest.mark.parametrize(
    ("part", "method", "error", "spared", "fault"),
    [
        ("comms", "window_hash", ChainUnavailable("no chain"), {1, 2}, "no update evaluated: no chain"),
        ("data_loader", "digest", DataError("no pages"), {1, 2}, "no update evaluated: no pages"),
        ("data_loader", "held_out", DataError("no pages"), {1, 2}, "no update evaluated: no pages"),
        ("data_loader", "assigned", DataError("no pages"), {1, 2}, "uid 1 not evaluated: no pages"),
        (
            "comms",
            "track_active_peers",
            StoreUnavailable("no network"),
            set(),
            "activity unknown: no network",
        ),
    ],
)
async def test_own_faults_change_no_score(world, monkeypatch, part, method, error, spared, fault) -> None:
    monkeypatch.setattr(getattr(world, part), method, fails(error))
    seen, after = await observe(world)
    assert fault in seen.faults
    for uid in spared:
        assert seen.observations[uid].evaluation is None
        assert unmoved(world.board.peer_scores[uid], after[uid])


async def test_a_model_with_a_loss_that_is_not_finite_evaluates_no_update(world: World) -> None:
    some = next(iter(world.train_state.parameters.values()))
    held = some.detach().clone()
    try:
        with torch.no_grad():
            some.fill_(float("nan"))
        seen, after = await observe(world)
    finally:
        with torch.no_grad():
            some.copy_(held)
    assert "the model's own loss is not finite" in seen.faults[0]
    assert all(seen.observations[uid].evaluation is None for uid in EVERYBODY)
    judged = ("mu", "sigma", "binary", "signs", "evaluations")
    assert all(
        getattr(after[uid], name) == getattr(world.board.peer_scores[uid], name) for uid in (1, 2) for name in judged
    )


async def test_buckets_that_do_not_answer_change_no_score(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for uid in EVERYBODY:
        for method in ("head", "get"):
            monkeypatch.setattr(world.by_uid[uid].store, method, fails(StoreUnavailable("no network")))
    seen, after = await observe(world)
    assert {one.verdict for one in seen.observations.values()} == {Reason.UNAVAILABLE}
    assert all(unmoved(world.board.peer_scores[uid], after[uid]) for uid in EVERYBODY)


async def test_reports_that_can_t_be_read_say_nothing_of_sync(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tplr.node.observer.REPORT_SECONDS", 0.0)
    monkeypatch.setattr(world.comms, "get_report", fails(StoreUnavailable("no network")))
    seen, after = await observe(world)
    assert all(one.behind is None for one in seen.observations.values())
    assert all(after[uid].sync == world.board.peer_scores[uid].sync for uid in EVERYBODY)
    assert all(seen.observations[uid].evaluation for uid in (1, 2))


async def test_the_next_one_s_pages_load_while_one_is_measured(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[tuple[str, int]] = []
    measure = world.train_state.evaluate
    monkeypatch.setattr(world.data_loader, "read_ahead", lambda uid, _: happened.append(("load", uid)))

    def evaluate(update, own, random):
        happened.append(("measure", update.uid))
        return measure(update, own, random)

    monkeypatch.setattr(world.train_state, "evaluate", evaluate)
    await observe(world)
    assert happened == [("load", 1), ("load", 2), ("measure", 1), ("measure", 2)]

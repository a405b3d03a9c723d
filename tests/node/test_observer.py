"""A validator's observations; a failure on its own side is a line in ``faults`` and costs no miner."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from other_pages import OtherPages

from tplr.errors import ChainUnavailable, DataError, PayloadError, StoreUnavailable
from tplr.localnet.attackers import Honest, Late
from tplr.localnet.simulation import World, profile, small
from tplr.node.observation import Observation
from tplr.schemas import PeerList, PeerScore, Reason
from tplr.scoring.penalties import strikes
from tplr.scoring.profiles import score_board

LATE, ELSEWHERE = 5, 6
HONEST = {1, 2, 3, 4}


def build(honest: int = 4, **changes) -> World:
    """Three windows of honest miners, a late one and one with other pages; of the last window only the uploads."""
    hparams = small(profile("demo"), pages_per_window=2, evaluation_sequences=16, gather_patience_seconds=0.1)
    hparams = hparams.model_copy(update=changes)
    members = [*(Honest(8 - 4 * (i % 2)) for i in range(honest)), Late("late", 4), OtherPages("other pages", 4)]
    world = World(hparams, members)
    asyncio.run(world.run(2))
    for member in world.members:
        asyncio.run(member.act(world, world.window))
    return world


@pytest.fixture(scope="module")
def lived() -> World:
    return build()


@pytest.fixture
def world(lived: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """``lived``, restored to the state before its observer has seen the last window."""
    sync = lived._observer._sync
    monkeypatch.setattr(sync, "_expected", dict(sync._expected))
    return lived


async def observe(world: World) -> tuple[Observation, dict[int, PeerScore]]:
    """Return the observations of the last window, and the peer scores after it."""
    gathered = await world.comms.gather_updates(world.peers, world.window, world.spec)
    seen = await world._observer.observe(gathered, world.board)
    board = score_board(world.hparams)
    board.load_state_dict(world.board.state_dict())
    return seen, cast(Any, dict(board.see(seen.evidence).peer_scores))


def fails(error: Exception) -> Callable[..., object]:
    """A failing replacement of a coroutine function."""

    async def call(*_: object, **__: object) -> object:
        raise error

    return call


async def test_everybody_is_measured_in_every_window(world: World) -> None:
    seen, after = await observe(world)
    assert seen.faults == []
    assert seen.alignment is not None
    assert set(seen.alignment.uids) == HONEST
    assert all(seen.observations[uid].included for uid in {*HONEST, ELSEWHERE})
    assert seen.observations[LATE].verdict == "too_late"
    assert not seen.observations[LATE].included
    assert seen.observations[ELSEWHERE].assigned_pages is False
    assert all(after[uid].measured == 3 for uid in HONEST)
    assert after[LATE].measured == after[ELSEWHERE].measured == 0
    assert all(seen.observations[uid].behind == 0 for uid in {*HONEST, LATE, ELSEWHERE})
    for uid in HONEST:  # all take the test, because they are fewer than uids_per_window
        assert len(seen.observations[uid].assigned_products) == len(HONEST)
        assert after[uid].tests == 3
    (by_loss,) = [one.evaluation for one in seen.observations.values() if one.evaluation]  # one in four
    assert by_loss.assigned is None
    assert by_loss.held_out.sequences == 8  # the first of two batches, as a quarter rounded up
    held_out = await world.data_loader.held_out(world.window, world.comms.hotkey, ())
    losses = [world.train_state.baseline(held_out.batches[i : i + 1]).losses.mean() for i in range(2)]
    assert by_loss.held_out.before == pytest.approx(losses[0], rel=1e-6)
    assert seen.alignment.loss == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert world.records[0].outcome.struck == {ELSEWHERE: ("wrong_pages",)}


async def test_products_and_losses_are_of_the_published_decimals(world: World) -> None:
    seen, _ = await observe(world)
    assert seen.alignment is not None
    numbers = [*seen.alignment.products, *seen.alignment.gram, *seen.alignment.norms]
    numbers += [x for one in seen.observations.values() for x in one.assigned_products]
    assert all(round(x, 6) == x for x in numbers)


async def test_who_is_on_probation_is_measured_and_not_included(world: World, monkeypatch) -> None:
    async def listed(window: int | None = None) -> PeerList:
        newcomers = (4,) if window is None else ()  # the newest list is not in effect yet
        return PeerList(
            peers=(1, 2),
            probation=(3, *newcomers),
            initial_selection=False,
            sync_window=0,
            first_effective_window=window or 99,
        )

    monkeypatch.setattr(world.comms, "get_peer_list", listed)
    monkeypatch.setattr(world, "peers", (1, 2))
    seen, after = await observe(world)
    assert seen.alignment is not None
    assert seen.alignment.uids == (1, 2, 3, 4)
    assert [seen.observations[uid].probation for uid in (1, 2, 3, 4, 5)] == [False, False, True, True, False]
    assert [seen.observations[uid].included for uid in (1, 2, 3, 4)] == [True, True, False, False]
    assert seen.observations[LATE].verdict is None
    assert all(after[uid].measured == 3 for uid in HONEST)
    assert all(seen.observations[uid].behind == 0 for uid in HONEST)


async def test_who_has_registered_since_is_not_judged_by_what_the_owner_before_did(world: World, monkeypatch) -> None:
    """It sent no update and has no report: by its predecessor's update it would be struck as out of sync."""
    neurons = [
        replace(one, hotkey="newcomer") if one.uid == 1 else one for one in world.comms.metagraph.neurons
    ]  # fmt: skip
    before = {one.uid: one.hotkey for one in world.comms.metagraph.neurons}

    async def hotkeys_in(_: int) -> dict[int, str]:
        return before

    store = world.by_uid[1].store
    kept = {key: one for key, one in store._objects.items() if not key.startswith("debug-")}
    monkeypatch.setattr(store, "_objects", kept)
    monkeypatch.setattr(world.comms, "metagraph", replace(world.comms.metagraph, neurons=tuple(neurons)))
    monkeypatch.setattr(world.comms, "hotkeys_in", hotkeys_in)
    seen, after = await observe(world)
    assert seen.alignment is not None
    assert 1 not in strikes(seen.evidence, max_behind=world.hparams.sync_max_steps_behind)
    assert 1 not in {**seen.observations, **after}
    assert seen.alignment.uids == (2, 3, 4)


@pytest.mark.parametrize(
    ("part", "method", "error", "fault", "measured"),
    [
        ("comms", "hotkeys_in", ChainUnavailable("no chain"), "hotkeys not compared: no chain", True),
        ("comms", "window_hash", ChainUnavailable("no chain"), "no update measured: no chain", False),
        ("data_loader", "digest", DataError("no pages"), "no update measured: no pages", False),
        ("data_loader", "held_out", DataError("no pages"), "no update measured: no pages", False),
        ("data_loader", "assigned", DataError("no pages"), "uid 1 not evaluated: no pages", True),
        ("comms", "get_peer_list", StoreUnavailable("no net"), "updates on probation not measured: no net", True),
        ("comms", "get_peer_list", PayloadError("elector's lie"), "updates on probation not measured: elector", True),
    ],
)
async def test_own_faults_cost_nobody(world, monkeypatch, part, method, error, fault, measured) -> None:
    monkeypatch.setattr(getattr(world, part), method, fails(error))
    seen, after = await observe(world)
    assert [one for one in seen.faults if one.startswith(fault)]
    assert (seen.alignment is not None) == measured
    before = world.board.peer_scores
    for uid in HONEST:
        if not measured:
            assert after[uid].credit == pytest.approx(before[uid].credit)  # a blank window
            assert (after[uid].measured, after[uid].mean) == (before[uid].measured, before[uid].mean)
        assert after[uid].tests >= before[uid].tests
    assert after[LATE].final == 0.0


async def test_a_model_with_a_loss_that_is_not_finite_measures_no_update(world: World) -> None:
    some = next(iter(world.train_state.parameters.values()))
    held = some.detach().clone()
    try:
        with torch.no_grad():
            some.fill_(float("nan"))
        seen, _ = await observe(world)
    finally:
        with torch.no_grad():
            some.copy_(held)
    assert "the model's own loss is not finite" in seen.faults[0]
    assert seen.alignment is None
    assert all(seen.observations[uid].evaluation is None for uid in HONEST)


async def test_who_can_not_be_reached_is_absent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a published set, a validator that reaches no miner includes no miner."""
    for uid in {*HONEST, LATE, ELSEWHERE}:
        for method in ("head", "get"):
            monkeypatch.setattr(world.by_uid[uid].store, method, fails(StoreUnavailable("no network")))
    seen, after = await observe(world)
    assert {one.verdict for one in seen.observations.values()} == {Reason.UNAVAILABLE}
    assert not any(one.included for one in seen.observations.values())
    before = cast(Any, world.board.peer_scores)
    paid = [uid for uid in HONEST if before[uid].credit > 0]
    assert paid
    assert all(after[uid].credit < before[uid].credit for uid in paid)


async def test_the_next_one_s_pages_load_while_one_is_measured(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[tuple[str, int]] = []
    test = world.train_state.own_alignment
    monkeypatch.setattr(world.data_loader, "read_ahead", lambda uid, _: happened.append(("load", uid)))

    def own_alignment(*given):
        happened.append(("test", len(happened)))
        return test(*given)

    monkeypatch.setattr(world.train_state, "own_alignment", own_alignment)
    await observe(world)
    loads = [("load", 1), ("load", 2), ("test", 2), ("load", 3), ("test", 4), ("load", 4), ("test", 6), ("test", 7)]
    assert happened == loads


async def test_with_few_updates_losses_are_compared_instead() -> None:
    """On assigned and on held-out pages, for all sampled miners, because there are no others to compare products
    with."""
    world = await asyncio.to_thread(build, honest=2)
    seen, after = await observe(world)
    assert seen.alignment is not None
    assert seen.alignment.uids == (1, 2)
    for uid in (1, 2):
        measured = seen.observations[uid].evaluation
        assert measured is not None
        assert measured.assigned is not None
        assert seen.observations[uid].assigned_products == ()
        assert after[uid].tests == 3


@pytest.mark.long
async def test_documented_observations() -> None:
    """Only sampled miners are evaluated, on the peer list or not, and copies are searched."""
    world = await asyncio.to_thread(build, profile="documented")
    seen, after = await observe(world)
    assert seen.faults == []
    assert seen.alignment is None
    assert all(seen.observations[uid].evaluation.assigned for uid in HONEST)  # pyright: ignore[reportOptionalMemberAccess]
    assert not any(seen.observations[uid].assigned_products for uid in HONEST)
    assert {seen.observations[uid].copied for uid in HONEST} == {""}
    assert seen.observations[LATE].active
    assert after[LATE].multipliers == {"late": pytest.approx(0.75**3)}  # pyright: ignore[reportAttributeAccessIssue]

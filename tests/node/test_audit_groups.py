"""An audit compares who is listed, on probation or excluded, and verdicts and pages whatever these flags are.

A validator that lies scores by its lie, so the scores of its reports follow from their evidence.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from other_pages import OtherPages

from tplr.errors import StoreUnavailable
from tplr.keys import gradient_key
from tplr.localnet.attackers import Honest, Malformed
from tplr.localnet.simulation import START_WINDOW, VALIDATOR, World, profile, small
from tplr.node.audit import Auditor, Difference
from tplr.node.observer import Observer
from tplr.node.train_state import TrainState
from tplr.schemas import VALID, PeerList, PeerObservation
from tplr.training.model import build_model

LAST = 2
HONEST, UNLISTED, ELSEWHERE, MALFORMED = 1, 4, 5, 6  # uids
EVERYBODY, SOME, NOBODY = (1, 2, 3, 4, 5, 6), (1, 2, 3), ()


def create(rules: str = "hardened", peers: tuple[int, ...] = EVERYBODY) -> World:
    """A network with these peers on its list; if there are none, all miners are on probation."""
    hparams = small(profile("demo"), pages_per_window=1, evaluation_sequences=8, peer_replacement_frequency=50)
    hparams = hparams.model_copy(update={"profile": rules, "probation_windows": 0 if peers else 50})
    members = [*(Honest(4) for _ in range(4)), OtherPages("other pages", 4), Malformed("", 4)]
    world = World(hparams, members, measures_loss=False)
    world.peers = peers
    return world


async def run(world: World) -> None:
    await asyncio.to_thread(lambda: asyncio.run(world.run(LAST)))


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch):
    """Runs a network whose validator lies about a miner, if it is one, before it measures the others."""
    honest = Observer._note_pages

    async def live(world: World, uid: int = 0, **lie: object) -> World:
        async def note_pages(self: Observer, seen: Any, updates: Any) -> None:
            await honest(self, seen, updates)
            if lie.get("verdict", VALID) != VALID:
                seen.note(uid, assigned_pages=None)
            seen.note(uid, **lie)

        monkeypatch.setattr(Observer, "_note_pages", note_pages)
        await run(world)
        monkeypatch.setattr(Observer, "_note_pages", honest)
        return world

    return live


async def audit(world: World, tmp_path: Path) -> tuple[Difference | None, str]:
    """Audit all windows; return the difference, and the unverified claims."""
    train_state = TrainState(build_model(world.hparams), world.hparams, tmp_path)
    train_state.start_window = START_WINDOW
    loader, comms = cast(Any, world.data_loader), cast(Any, world.comms)
    auditor = Auditor(train_state, START_WINDOW, loader, comms, world.hparams, validator=VALIDATOR)
    return await auditor.audit(LAST, scores_from=START_WINDOW), "\n".join(auditor.unverified)


async def observation(world: World, uid: int, window: int = START_WINDOW) -> PeerObservation:
    return (await world.comms.get_scores(VALIDATOR, window)).observations[str(uid)]


@pytest.mark.parametrize(
    ("rules", "peers"),
    [
        ("hardened", EVERYBODY),
        ("hardened", SOME),
        ("hardened", NOBODY),
        ("documented", EVERYBODY),
        ("documented", SOME),
    ],
)
async def test_an_honest_validator_agrees(tmp_path: Path, rules: str, peers: tuple[int, ...]) -> None:
    world = create(rules, peers)
    await run(world)
    one = await observation(world, UNLISTED)
    assert one.listed == (peers == EVERYBODY)
    assert one.probation == (peers == NOBODY)
    assert one.verdict == (None if (rules, peers) == ("hardened", SOME) else VALID)
    assert await audit(world, tmp_path) == (None, "")


@pytest.mark.parametrize(
    ("rules", "peers", "uid", "lie", "what"),
    [
        # A strike for a rival, a window that does not count for a friend, and the loss of a place.
        ("hardened", EVERYBODY, HONEST, {"verdict": "malformed", "listed": False}, "verdict"),
        ("hardened", EVERYBODY, HONEST, {"verdict": "missing", "listed": False}, "verdict"),
        ("hardened", EVERYBODY, HONEST, {"verdict": "excluded", "listed": False}, "verdict"),
        ("hardened", EVERYBODY, HONEST, {"listed": False}, "listed"),
        ("hardened", EVERYBODY, HONEST, {"probation": True}, "probation"),
        ("hardened", EVERYBODY, MALFORMED, {"listed": False}, "listed"),
        ("documented", EVERYBODY, HONEST, {"verdict": "malformed", "listed": False}, "verdict"),
        ("documented", EVERYBODY, HONEST, {"probation": True}, "probation"),
        ("documented", EVERYBODY, MALFORMED, {"listed": False}, "listed"),
        # On no list: the flags are true, the verdict or the pages are not.
        ("hardened", SOME, UNLISTED, {"verdict": "malformed"}, "verdict"),
        ("documented", SOME, UNLISTED, {"verdict": "malformed"}, "verdict"),
        ("documented", SOME, UNLISTED, {"assigned_pages": False}, "pages"),
        ("documented", SOME, ELSEWHERE, {"assigned_pages": True}, "pages"),
        # On probation.
        ("hardened", NOBODY, HONEST, {"verdict": "missing", "probation": False}, "probation"),
        ("hardened", NOBODY, HONEST, {"listed": True, "probation": False}, "listed"),
        ("hardened", NOBODY, HONEST, {"assigned_pages": False}, "pages"),
        ("hardened", NOBODY, ELSEWHERE, {"assigned_pages": True}, "pages"),
    ],
)
async def test_a_lie_is_found_out(
    lives: Callable, tmp_path: Path, rules: str, peers: tuple[int, ...], uid: int, lie: dict, what: str
) -> None:
    world = await lives(create(rules, peers), uid, **lie)
    found, believed = await audit(world, tmp_path)
    named = {
        "verdict": (f"verdict on uid {uid}", lie.get("verdict"), VALID),
        "pages": (f"pages of uid {uid}", lie.get("assigned_pages"), not lie.get("assigned_pages")),
        "listed": (f"uid {uid} listed", lie.get("listed"), not lie.get("listed")),
        "probation": (f"uid {uid} on probation", lie.get("probation"), not lie.get("probation")),
    }
    assert found == Difference(START_WINDOW, *named[what])
    assert believed == ""


async def test_who_is_said_to_be_excluded_is_excluded_by_the_set(lives: Callable, tmp_path: Path) -> None:
    world = await lives(create(peers=NOBODY), HONEST, verdict="excluded")
    found, _ = await audit(world, tmp_path)
    assert found
    assert (found.what, found.published) == (f"verdict on uid {HONEST}", "excluded")


@pytest.mark.parametrize("probation", [None, False, True])
async def test_an_excluded_miner_is_fetched_again(lives: Callable, tmp_path: Path, probation: bool | None) -> None:
    """An honest validator (``None``) publishes the verdict on the update that it fetched on probation."""
    world = create()
    world._excluded = dict.fromkeys(range(START_WINDOW, LAST + 1), frozenset({HONEST}))
    await (run(world) if probation is None else lives(world, HONEST, verdict="excluded", probation=probation))
    found, believed = await audit(world, tmp_path)
    assert believed == ""
    if probation is None:
        one = await observation(world, HONEST)
        assert (one.listed, one.probation, one.included, one.verdict) == (True, True, False, VALID)
        assert found is None
    else:
        assert found
        assert found.window == START_WINDOW
        assert found.what == (f"verdict on uid {HONEST}" if probation else f"uid {HONEST} on probation")


@pytest.mark.parametrize("peers", [EVERYBODY, NOBODY])
async def test_a_fault_explains_that_nobody_is_on_probation(tmp_path: Path, monkeypatch, peers) -> None:
    async def unreachable(*_: object) -> None:
        raise StoreUnavailable("no network")

    world = create(peers=peers)
    world._excluded = dict.fromkeys(range(START_WINDOW, LAST + 1), frozenset({HONEST}))
    monkeypatch.setattr(Observer, "_fetch_probation", unreachable)
    await run(world)
    one = await observation(world, HONEST)
    assert (one.probation, one.verdict) == (False, "excluded" if peers else None)
    found, believed = await audit(world, tmp_path)
    assert found is None
    assert "the validator's own fault not verified: updates on probation not measured: no network" in believed


async def test_who_is_on_a_newer_list_may_be_on_probation(tmp_path: Path) -> None:
    world = create(peers=SOME)
    later = {"initial_selection": False, "sync_window": LAST, "first_effective_window": LAST + 1}
    world.lists.append(PeerList(peers=SOME, probation=(UNLISTED,), **later))
    await run(world)
    one = await observation(world, UNLISTED)
    assert (one.listed, one.probation, one.verdict) == (False, True, VALID)
    found, believed = await audit(world, tmp_path)
    assert found is None
    assert {line.partition(": ")[2] for line in believed.splitlines()} == {
        f"probation of uids [{UNLISTED}] not verified: not on its list, perhaps on a newer one"
    }


@pytest.mark.parametrize("replaced", [False, True])
async def test_pages_of_a_deleted_or_replaced_update_are_left_open(lives: Callable, tmp_path: Path, replaced) -> None:
    world = await lives(create(peers=NOBODY), HONEST, assigned_pages=False)
    for window in (START_WINDOW, LAST):
        store, key = world.by_uid[HONEST].store, gradient_key(window, HONEST, world.hparams.version)
        del store._objects[key]
        if replaced:
            await store.put(key, b"{")
    found, believed = await audit(world, tmp_path)
    assert found is None
    assert f"{HONEST} valid, now {'too_late' if replaced else 'missing'}" in believed


async def test_with_the_documented_profile_losses_are_also_measured_on_the_assigned_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validator could leave out those that a miner's indicator follows from."""
    honest, world = Observer._measure_loss, create("documented")

    async def measure_loss(self: Observer, seen: Any, one: Any, assigned: Any, before: Any) -> None:
        await honest(self, seen, one, None if one.uid == HONEST else assigned, before)

    monkeypatch.setattr(Observer, "_measure_loss", measure_loss)
    await run(world)
    found, _ = await audit(world, tmp_path)
    assert found is not None
    assert found.what == f"loss on the assigned pages of uid {HONEST}"


async def test_a_measured_update_was_valid(lives: Callable, tmp_path: Path) -> None:
    """Without the update its losses can't be compared."""
    world = await lives(create("documented", SOME), UNLISTED, verdict="malformed", assigned_pages=True)
    assert (await observation(world, UNLISTED)).evaluation
    del world.by_uid[UNLISTED].store._objects[gradient_key(START_WINDOW, UNLISTED, world.hparams.version)]
    found, _ = await audit(world, tmp_path)
    assert found == Difference(START_WINDOW, f"verdict on uid {UNLISTED}", "malformed", VALID)

"""A validator's claims about miners' objects are compared with these; deleted objects do not incriminate it."""

import asyncio
import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any, cast

import pytest

from tplr.chain.base import Metagraph
from tplr.exchange.documents import put_document
from tplr.exchange.scores import put_scores
from tplr.keys import commit_key, debug_key, gradient_key
from tplr.localnet.attackers import Honest, Late, Malformed, OutOfSync
from tplr.localnet.simulation import START_WINDOW, VALIDATOR, WINDOW_SECONDS, World, profile, small
from tplr.node import audit_claims
from tplr.node.audit import Auditor, Difference
from tplr.node.audit_claims import SyncClaims, leaves_open, omissions, refutes
from tplr.node.train_state import TrainState
from tplr.schemas import (
    OUT_OF_SYNC,
    UNREAD,
    VALID,
    Alignment,
    Evaluation,
    Evidence,
    LossChange,
    PeerObservation,
    Reason,
    ScoreReport,
)
from tplr.scoring.profiles import score_board
from tplr.scoring.selection import evaluated_by_loss
from tplr.training.model import build_model

LAST = 3
HONEST, LEFT_OUT, ELSEWHERE, MALFORMED, LATE = 2, 5, 6, 7, 8  # uids


@pytest.fixture(scope="module")
def lived() -> World:
    """Five honest miners, one with another model, and two whose updates are refused; all are on probation first."""
    hparams = small(profile("demo"), pages_per_window=1, evaluation_sequences=8, peer_replacement_frequency=50)
    hparams = hparams.model_copy(update={"uids_per_window": 2, "pay_windows": 2, "probation_windows": 50})
    members = [*(Honest(4) for _ in range(5)), OutOfSync("", 4), Malformed("", 4), Late("", 4)]
    world = World(hparams, members, measures_loss=False)
    asyncio.run(world.run(LAST))
    return world


@pytest.fixture
def world(lived: World) -> Iterator[World]:
    """A world with buckets restored to their content after the last window, for any previous test."""
    stores = [lived.bucket, *(one.store for one in lived.members)]
    held = [dict(store._objects) for store in stores]
    yield lived
    for store, objects in zip(stores, held, strict=True):
        store._objects.clear()
        store._objects.update(objects)


async def audit(world: World, tmp_path: Path) -> tuple[Difference | None, str]:
    """Audit all windows; return the difference, and the unverified claims."""
    train_state = TrainState(build_model(world.hparams), world.hparams, tmp_path)
    train_state.start_window = START_WINDOW
    loader, comms = cast(Any, world.data_loader), cast(Any, world.comms)
    auditor = Auditor(train_state, START_WINDOW, loader, comms, world.hparams, validator=VALIDATOR)
    return await auditor.audit(LAST), "\n".join(auditor.unverified)


@pytest.fixture
def audited(world: World, tmp_path: Path):
    """Audits all windows; returns the difference, and the unverified claims."""
    return functools.partial(audit, world, tmp_path)


async def says(world: World, uid: int, **lie: object) -> None:
    """The validator signs a different statement about a miner in the last window."""
    report = await world.comms.get_scores(VALIDATOR, LAST)
    seen = {**report.observations, str(uid): report.observations[str(uid)].model_copy(update=lie)}
    await put_scores(world.bucket, report.model_copy(update={"observations": seen}).sealed(), world.signer)


async def test_an_honest_validator_agrees_and_nothing_is_believed(world: World, audited) -> None:
    report = await world.comms.get_scores(VALIDATOR, LAST)
    behind = {uid: report.observations[str(uid)].behind for uid in (HONEST, ELSEWHERE)}
    assert behind == {HONEST: 0, ELSEWHERE: OUT_OF_SYNC}
    assert await audited() == (None, "")


async def test_more_own_pages_tests_than_a_window_has_are_a_difference(world: World, audited) -> None:
    """The audit recomputes none of them, because each takes time."""
    report = await world.comms.get_scores(VALIDATOR, LAST)
    assert report.alignment
    products = (1.0,) * len(report.alignment.uids)
    seen = {uid: one.model_copy(update={"assigned_products": products}) for uid, one in report.observations.items()}
    await put_scores(world.bucket, report.model_copy(update={"observations": seen}).sealed(), world.signer)
    found, _ = await audited()
    assert found
    assert (found.window, found.what) == (LAST, f"a report of validator {VALIDATOR}")
    assert "8 own-pages tests, expected at most uids_per_window 2" in str(found.found)


@pytest.mark.parametrize(("uid", "lie"), [(HONEST, OUT_OF_SYNC), (HONEST, 2), (ELSEWHERE, 0), (ELSEWHERE, 3)])
async def test_a_lie_about_sync_is_found_out(world: World, audited, uid: int, lie: int) -> None:
    await says(world, uid, behind=lie)
    found, _ = await audited()
    truth = "0" if uid == HONEST else str(OUT_OF_SYNC)
    assert found == Difference(LAST, f"steps behind of uid {uid}", lie, truth)


@pytest.mark.parametrize(
    ("behind", "why"), [(UNREAD, "reported as not readable"), (None, "the validator did not judge")]
)
async def test_who_says_nothing_is_named(world: World, audited, behind: int | None, why: str) -> None:
    """No other node can know whether a bucket answered."""
    report = await world.comms.get_scores(VALIDATOR, LAST)
    claims = SyncClaims(cast(Any, world.comms), world.hparams, START_WINDOW)
    lie = report.observations[str(ELSEWHERE)].model_copy(update={"behind": behind})
    found = await claims.check(report.model_copy(update={"observations": {str(ELSEWHERE): lie}}))
    assert (found.unread, found.not_judged) == (([ELSEWHERE], []) if behind else ([], [ELSEWHERE]))
    assert not found.refuted
    await says(world, ELSEWHERE, behind=behind)
    found, believed = await audited()
    assert f"window {LAST}: steps behind of uids [{ELSEWHERE}] not verified: {why}" in believed
    assert behind is None or found is None  # None changes which rules lead to a strike


def delete(world: World, uid: int, *kinds: str, windows: tuple[int, ...] = (LAST,)) -> None:
    keys = {"gradient": gradient_key, "commit": commit_key, "debug": debug_key}
    for kind in kinds:
        for window in windows:
            del world.by_uid[uid].store._objects[keys[kind](window, uid, world.hparams.version)]


@pytest.mark.parametrize("uid", [HONEST, ELSEWHERE])
@pytest.mark.parametrize("replaced", [False, True])
async def test_a_report_that_is_deleted_or_replaced_makes_nobody_a_liar(world, audited, uid, replaced) -> None:
    """A miner can't show another report afterwards either, because of the store's time stamp."""
    delete(world, uid, "debug", windows=(LAST - 1,))
    if replaced:
        other = await world.comms.get_report(uid, LAST)
        world.now = WINDOW_SECONDS * (LAST + 1) - 1  # within the clocks' difference
        lie = other.model_copy(update={"window": LAST - 1})
        key = debug_key(LAST - 1, uid, world.hparams.version)
        await put_document(world.by_uid[uid].store, key, lie, window=LAST - 1, signer=world.by_uid[uid].signer)
    found, believed = await audited()
    assert found is None
    assert believed == (
        f"window {LAST}: steps behind of uids [{uid}] not verified: "
        "the miners' reports are deleted, replaced or not readable now"
    )


async def test_a_report_in_another_bucket_than_then_proves_nothing(world: World, audited, monkeypatch) -> None:
    async def buckets_in(window: int) -> dict[int, object]:
        return {**world.comms.commitments, HONEST: "another"}

    monkeypatch.setattr(world.comms, "buckets_in", buckets_in)
    await says(world, HONEST, behind=OUT_OF_SYNC)
    _, believed = await audited()
    assert f"steps behind of uids [{HONEST}] not verified" in believed


@pytest.mark.parametrize("then", [True, False])
async def test_whose_uid_is_another_s_by_now_makes_nobody_a_liar(
    world: World, audited, monkeypatch, then: bool
) -> None:
    """Reports are signed by the hotkey of that time. A validator that names neither hotkey lies."""
    before = await world.comms.hotkeys_in(LAST)
    neurons = [
        replace(neuron, hotkey="another") if neuron.uid == HONEST else neuron
        for neuron in world.comms.metagraph.neurons
    ]
    monkeypatch.setattr(world.comms, "metagraph", replace(world.comms.metagraph, neurons=tuple(neurons)))

    async def hotkeys_in(_: int) -> dict[int, str]:
        return before if then else {**before, HONEST: "a third"}

    monkeypatch.setattr(world.comms, "hotkeys_in", hotkeys_in)
    found, believed = await audited()
    if then:
        assert found is None
        assert f"steps behind of uids [{HONEST}] not verified" in believed
    else:
        assert found is not None
        assert found.what == f"hotkey of uid {HONEST}"


@pytest.mark.parametrize("fault", [None, "hotkeys not compared: no chain"])
async def test_a_later_owner_of_a_uid_gets_none_of_its_windows(
    world: World, audited, monkeypatch, fault: str | None
) -> None:
    """Who registers a uid after a window's end did no work in it. Only a fault explains that its hotkey is observed."""
    report, now = await world.comms.get_scores(VALIDATOR, LAST), await world.comms.hotkeys_in(LAST)

    async def hotkeys_in(window: int) -> dict[int, str]:
        return {**now, HONEST: "the owner before"} if window <= LAST else now

    monkeypatch.setattr(world.comms, "hotkeys_in", hotkeys_in)
    await put_scores(
        world.bucket, report.model_copy(update={"faults": (fault,) if fault else ()}).sealed(), world.signer
    )
    found, believed = await audited()
    lie = Difference(LAST, f"hotkey of uid {HONEST}", now[HONEST], "the owner before")
    assert found == (None if fault else lie)
    assert (f"hotkeys of uids ['{HONEST}'] not verified" in believed) == bool(fault)


async def test_a_report_that_is_none_is_out_of_sync_only_if_it_was_there_in_time(world: World, audited) -> None:
    key, store = debug_key(LAST - 1, HONEST, world.hparams.version), world.by_uid[HONEST].store
    world.now = store._objects[key][0].last_modified
    await store.put(key, b"{")
    found, _ = await audited()
    assert found == Difference(LAST, f"steps behind of uid {HONEST}", 0, str(OUT_OF_SYNC))


async def test_a_miner_that_missed_a_window_is_a_step_behind(world: World, audited) -> None:
    """Its report of that window may have been deleted since: then 0 steps are also believed, but not 2."""
    delete(world, HONEST, "debug", windows=(LAST - 1,))
    for behind, refuted in ((1, False), (0, False), (2, True)):
        await says(world, HONEST, behind=behind)
        found, _ = await audited()
        assert (found is not None) == refuted


async def test_nobody_is_judged_who_was_not_asked(world: World) -> None:
    report = await world.comms.get_scores(VALIDATOR, LAST)
    claims = SyncClaims(cast(Any, world.comms), world.hparams, START_WINDOW)
    stranger = PeerObservation(hotkey="1", behind=0)
    found = await claims.check(report.model_copy(update={"observations": {"1": stranger}}))
    assert found.refuted == {1: (0, "not judged")}
    first = report.model_copy(update={"window": START_WINDOW})
    assert set((await claims.check(first)).refuted) == set(map(int, report.observations))


async def test_nothing_is_said_of_reports_right_after_a_void_window(world: World, monkeypatch) -> None:
    async def void(*_: object) -> bool:
        return True

    monkeypatch.setattr(audit_claims, "after_void", void)
    report = await world.comms.get_scores(VALIDATOR, LAST)
    found = await SyncClaims(cast(Any, world.comms), world.hparams, START_WINDOW).check(report)
    assert not found.refuted
    assert found.gone == sorted(map(int, report.observations))


@pytest.mark.parametrize(
    ("uid", "lie", "now"),
    [
        (MALFORMED, Reason.MISSING, "wrong_size"),  # spares a friend a strike
        (MALFORMED, Reason.EMPTY, "wrong_size"),
        (HONEST, Reason.MALFORMED, VALID),  # strikes a rival
        (HONEST, Reason.TOO_LATE, VALID),
    ],
)
async def test_a_lie_about_an_update_is_found_out(world: World, audited, uid: int, lie: Reason, now: str) -> None:
    await says(world, uid, verdict=lie.value, assigned_pages=None)
    found, _ = await audited()
    assert found == Difference(LAST, f"verdict on uid {uid}", lie.value, now)


async def test_an_update_that_is_deleted_makes_nobody_a_liar(world: World, audited) -> None:
    """Everything that does not depend on it is still compared."""
    delete(world, HONEST, "gradient")
    delete(world, MALFORMED, "gradient")
    found, believed = await audited()
    assert found is None
    assert f"{MALFORMED} wrong_size, now missing" in believed
    assert f"{HONEST} valid, now missing" in believed
    report = await world.comms.get_scores(VALIDATOR, LAST)
    assert report.alignment is not None
    products = [*report.alignment.products]
    products[report.alignment.uids.index(HONEST + 1)] += 0.01
    lie = report.model_copy(update={"alignment": report.alignment.model_copy(update={"products": tuple(products)})})
    await put_scores(world.bucket, lie.sealed(), world.signer)
    found, _ = await audited()
    assert found is not None
    assert found.what == "products"


@pytest.mark.long
async def test_so_does_one_that_set_the_norm_caps_of_a_run_s_first_windows(tmp_path: Path) -> None:
    """While no update is included, caps follow from all updates, so products are not verified without one."""
    hparams = small(profile("sparseloco"), pages_per_window=1, evaluation_sequences=8, uids_per_window=2)
    world = World(
        hparams.model_copy(update={"probation_windows": 50}), [Honest(n) for n in (1, 2, 4, 8, 8)], measures_loss=False
    )
    await world.run(LAST)
    assert await audit(world, tmp_path) == (None, "")
    delete(world, 3, "gradient")
    found, believed = await audit(world, tmp_path)
    assert found is None
    assert "products and losses not verified: they depend on the updates of uids [3]" in believed


async def test_so_does_a_commit(world: World, audited) -> None:
    delete(world, HONEST, "commit")
    found, believed = await audited()
    assert found is None
    assert f"{HONEST} valid, now no_commit" in believed


@pytest.mark.parametrize(
    ("now", "published", "expected"),
    [
        (VALID, VALID, (False, False)),
        (VALID, Reason.MISSING, (True, False)),
        (VALID, Reason.UNAVAILABLE, (False, True)),
        # It may have been replaced within the bound, after the validator read it.
        (Reason.MALFORMED, VALID, (False, True)),
        (Reason.TOO_EARLY, VALID, (True, False)),
        (Reason.NO_BUCKET, VALID, (True, False)),
        # A bucket can be closed, and opened later.
        (VALID, Reason.DENIED, (False, True)),
        (Reason.MALFORMED, Reason.EXCLUDED, (False, True)),
        (Reason.MISSING, Reason.MALFORMED, (False, True)),
        (Reason.TOO_LATE, VALID, (False, True)),
        (Reason.NO_COMMIT, Reason.EMPTY, (False, True)),
        (Reason.DENIED, VALID, (False, True)),
    ],
)
def test_verdicts(now: str, published: str, expected: tuple[bool, bool]) -> None:
    """Verdicts of a validator are refuted or left open."""
    assert (refutes(now, published), leaves_open(now, published)) == expected


def score_report(
    observations: dict[int, PeerObservation], *, measured: tuple[int, ...] = (), faults: tuple[str, ...] = ()
) -> ScoreReport:
    count = len(measured)
    gram = tuple(float(i == j) for i in range(count) for j in range(i, count))
    alignment = Alignment(uids=measured, products=(0.5,) * count, norms=(1.0,) * count, gram=gram)
    return ScoreReport(
        window=LAST,
        uid=VALIDATOR,
        profile="hardened",
        held_out_pages="",
        faults=faults,
        observations={str(uid): seen for uid, seen in observations.items()},
        alignment=alignment if measured else None,
        follows_from=(),
        peer_scores={},
        struck={},
        weights={},
        weights_set=None,
    )


VALID_ONE = PeerObservation(hotkey="1", verdict=VALID, assigned_pages=True)
TESTED = (0.9, 0.1, 0.2, 0.35, 0.3, 0.15)  # products on the pages of uid 1
CHANGE = LossChange(before=4.0, after=3.9, error=0.01, sequences=64)
ON_HELD_OUT, ON_BOTH = Evaluation(assigned=None, held_out=CHANGE), Evaluation(assigned=CHANGE, held_out=CHANGE)


@pytest.mark.parametrize(
    ("seen", "measured", "fault", "what"),
    [
        ({}, (), "no update measured: no data", "uid 1 measured"),
        ({"assigned_pages": None}, (), "no update measured: no data", "pages of uid 1"),
        ({"assigned_pages": False}, (1,), None, "uid 1 measured"),
        ({"sampled": True}, (1, 2, 3, 4), "uid 1 not evaluated: no data", "own-pages test of uid 1"),
        ({"sampled": True}, (1, 2), "uid 1 not evaluated: no data", "loss of uid 1"),
        ({"assigned_products": (0.1, 0.2, 0.3, 0.4)}, (1, 2, 3, 4), None, "uid 1 tested"),
    ],
)
def test_what_is_left_out_needs_a_fault(seen: dict, measured: tuple[int, ...], fault: str | None, what: str) -> None:
    others = dict.fromkeys(measured, VALID_ONE)
    observations = {**others, 1: VALID_ONE.model_copy(update=seen)}
    found = [one for one, *_ in omissions(score_report(observations, measured=measured), 0)]
    assert found[:1] == [what]
    # The fault of another miner does not explain this one.
    faults = ("uid 11 not evaluated: no data", *([fault] if fault else []))
    found = [one for one, *_ in omissions(score_report(observations, measured=measured, faults=faults), 0)]
    assert found == ([] if fault else [what])


def test_who_measured_some_updates_can_not_say_that_it_measured_none() -> None:
    """Otherwise it could leave out so many others that no test is possible, and have losses compared instead."""
    observations = dict.fromkeys((1, 2, 3), VALID_ONE) | {4: VALID_ONE.model_copy(update={"assigned_pages": None})}
    report = score_report(observations, measured=(1, 2, 3), faults=("no update measured: no data",))
    assert [one for one, *_ in omissions(report, 0)] == ["pages of uid 4"]


def test_whose_loss_is_measured_is_drawn() -> None:
    """A validator that measures more losses than required chooses the miners whose calibration is checked."""
    sampled = VALID_ONE.model_copy(update={"sampled": True, "assigned_products": (0.9, 0.1, 0.2, 0.35, 0.3, 0.15)})
    seen = dict.fromkeys(range(1, 7), sampled)
    (drawn, other) = evaluated_by_loss(seen, seed=5)
    due = {one for one, *_ in omissions(score_report(seen, measured=tuple(seen)), 5)}
    assert due == {f"loss of uid {drawn}", f"loss of uid {other}"}


@pytest.mark.parametrize(
    ("seen", "measured", "what"),
    [
        # Three updates are too few for a test: the losses on the assigned pages stand in for it.
        ({"evaluation": ON_HELD_OUT}, (1, 2, 3), "loss on the assigned pages of uid 1"),
        ({"evaluation": ON_BOTH}, (1, 2, 3), None),
        (
            {"evaluation": ON_BOTH, "assigned_products": TESTED},
            tuple(range(1, 7)),
            "loss on the assigned pages of uid 1",
        ),
        ({"evaluation": ON_HELD_OUT, "assigned_products": TESTED}, tuple(range(1, 7)), None),
        # The test is made first, so its fault prevents both.
        ({"evaluation": ON_BOTH}, tuple(range(1, 7)), "loss of uid 1"),
        ({"evaluation": ON_HELD_OUT}, tuple(range(1, 7)), "loss of uid 1"),
        ({}, tuple(range(1, 7)), None),
    ],
)
def test_losses_on_assigned_pages_are_measured_where_no_test_is_possible(
    seen: dict, measured: tuple[int, ...], what: str | None
) -> None:
    """With them left out a rival has no test, so no pay; with them instead of a failed test a friend is paid."""
    observations = {**dict.fromkeys(measured, VALID_ONE), 1: VALID_ONE.model_copy(update={"sampled": True, **seen})}
    report = score_report(observations, measured=measured, faults=("uid 1 not evaluated: no data",))
    found = [one for one, *_ in omissions(report, 0)]
    assert found[:1] == ([what] if what else [])


async def test_who_is_on_the_list_must_be_asked(world: World, audited) -> None:
    await says(world, LATE, verdict=None)
    found, _ = await audited()
    assert found == Difference(LAST, f"verdict on uid {LATE}", None, "a verdict, or a fault")
    report = await world.comms.get_scores(VALIDATOR, LAST)
    faulty = report.model_copy(update={"faults": ("updates on probation not measured: no network",)})
    await put_scores(world.bucket, faulty.sealed(), world.signer)
    found, believed = await audited()
    assert found is None
    assert "the validator's own fault not verified: updates on probation not measured: no network" in believed


async def leaves_out(world: World, uid: int) -> None:
    """The validator publishes its last report as if there were no miner ``uid``, with the scores that follow."""
    report = await world.comms.get_scores(VALIDATOR, LAST)
    aligned = report.alignment
    assert aligned
    there = [one != uid for one in aligned.uids]
    pairs = [one and other for i, one in enumerate(there) for other in there[i:]]
    kept = {name: tuple(compress(getattr(aligned, name), there)) for name in ("uids", "products", "norms")}
    seen = {
        key: one.model_copy(update={"assigned_products": tuple(compress(one.assigned_products, there))})
        for key, one in report.observations.items()
        if key != str(uid)
    }
    alignment = aligned.model_copy(update={**kept, "gram": tuple(compress(aligned.gram, pairs))})
    board = score_board(world.hparams)
    board.resume([await world.comms.get_scores(VALIDATOR, window) for window in report.follows_from])
    outcome = board.see(Evidence(window=LAST, observations=seen, alignment=alignment))
    scores = {str(one): score for one, score in outcome.peer_scores.items()}
    weights = {str(one): weight for one, weight in board.weights.items()}
    lie = {"observations": seen, "alignment": alignment, "peer_scores": scores, "weights": weights}
    await put_scores(world.bucket, report.model_copy(update=lie).sealed(), world.signer)


@pytest.mark.parametrize("change", [None, "hotkey", "stake", "bucket"])
async def test_a_miner_that_is_left_out_is_found(world: World, audited, monkeypatch, change: str | None) -> None:
    """Its score would be none. Another owner, a validator's stake or no bucket at that time explain it."""
    await leaves_out(world, LEFT_OUT)
    now = world.comms.metagraph

    async def metagraph_in(window: int) -> Metagraph:
        stake, hotkey = world.hparams.eval_stake_limit + 1, world.by_uid[HONEST].hotkey
        other = {"hotkey": {"hotkey": hotkey}, "stake": {"stake": stake}}.get(change or "", {})
        neurons = [replace(one, **other) if one.uid == LEFT_OUT and window == LAST else one for one in now.neurons]
        return Metagraph(now.block, tuple(neurons))

    async def buckets_in(window: int) -> dict[int, object]:
        return {uid: one for uid, one in world.comms.commitments.items() if (uid, change) != (LEFT_OUT, "bucket")}

    monkeypatch.setattr(world.comms, "metagraph_in", metagraph_in)
    if change == "bucket":
        monkeypatch.setattr(world.comms, "buckets_in", buckets_in)
    found, _ = await audited()
    lie = Difference(LAST, f"observation of uid {LEFT_OUT}", None, "one, as of a miner")
    assert found == (None if change else lie)

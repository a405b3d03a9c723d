"""An audit recomputes a validator's published scores, and names the first false statement."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tplr.errors import ScoresSealed, StoreUnavailable, WindowLost
from tplr.exchange.aggregates import IncludedSet, reported_set
from tplr.exchange.documents import put_document
from tplr.exchange.scores import put_scores
from tplr.keys import commit_key, debug_key, gradient_key, scores_key
from tplr.localnet.attackers import Honest, Late, Malformed
from tplr.localnet.simulation import START_WINDOW, VALIDATOR, World, profile, small
from tplr.node.audit import Auditor
from tplr.node.train_state import TrainState
from tplr.schemas import ObjectInfo, Reason, ScoreReport
from tplr.scoring.profiles import score_board
from tplr.storage import MemoryStore
from tplr.training.model import build_model

WINDOWS = 3
LAST = WINDOWS


def build(rules: str = "hardened", **changes: int) -> World:
    """Six miners with a valid update, and two without; two are evaluated in each window."""
    hparams = small(profile("demo"), pages_per_window=2, evaluation_sequences=16, peer_replacement_frequency=50)
    hparams = hparams.model_copy(update={"uids_per_window": 2, "pay_windows": 2, "profile": rules, **changes})
    members = [*(Honest(8) for _ in range(6)), Malformed("malformed", 4), Late("late by one second", 4)]
    world = World(hparams, members, measures_loss=False)
    asyncio.run(world.run(WINDOWS))
    return world


@pytest.fixture(scope="module")
def world() -> World:
    return build()


class Overlapping(Honest):
    """Trains each window after the first from a model without the previous window's set, which arrives in the
    meantime."""

    own_model = True

    async def act(self, world: World, window: int) -> None:
        pages = world.pages(self.uid, window)
        if window == START_WINDOW:
            stats = self.train_state.train(pages.batches, window)
        else:
            stats = self.train_state.continue_training()
        assert stats.batches == len(pages.batches)
        about = {"window": window, "uid": self.uid, "pages_digest": pages.digest, "batches": stats.batches}
        await self.publish(world, window, self.train_state.pack(**about))

    async def report(self, world: World, window: int) -> None:
        steps = iter([False, True])
        batches = world.pages(self.uid, window + 1).batches
        assert self.train_state.train(batches, window + 1, pause=lambda: next(steps)).paused
        included = (await world.comms.get_report(VALIDATOR, window)).included
        gathered = await world.comms.gather_updates([int(uid) for uid in included], window, world.spec)
        self.train_state.apply([one.update for one in gathered.updates], window)
        self.train_state.own_applied(window)
        await super().report(world, window)


def new_auditor(world: World, tmp_path: Path) -> Auditor:
    train_state = TrainState(build_model(world.hparams), world.hparams, tmp_path)
    train_state.start_window = START_WINDOW
    loader, comms = cast(Any, world.data_loader), cast(Any, world.comms)
    return Auditor(train_state, START_WINDOW, loader, comms, world.hparams, validator=VALIDATOR)


async def audit(world: World, tmp_path: Path, until: int = LAST, *, scores_from: int = START_WINDOW):
    return await new_auditor(world, tmp_path).audit(until, scores_from=scores_from)


async def test_an_audit_of_an_honest_validator_agrees(world: World, tmp_path: Path) -> None:
    assert any(seen.evaluation for seen in world.records[-1].seen.observations.values())
    assert await audit(world, tmp_path) is None


async def test_so_does_one_with_another_number_of_threads(world: World, tmp_path: Path) -> None:
    """Its last bits differ; published values are rounded, and compared with a tolerance."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert await audit(world, tmp_path) is None
    finally:
        torch.set_num_threads(threads)


@pytest.mark.long
async def test_an_audit_of_the_documented_profile_agrees(tmp_path: Path) -> None:
    assert await audit(await asyncio.to_thread(build, "documented"), tmp_path) is None


@pytest.mark.long
async def test_an_audit_agrees_where_miners_train_while_a_set_is_applied(tmp_path: Path) -> None:
    """With ``outer_delay`` 1 nodes hold the same models, and the published values of validators are recomputed
    equally."""
    changes = {"pages_per_window": 2, "evaluation_sequences": 16, "pay_windows": 2, "uids_per_window": 1}
    hparams = small(profile("muon"), outer_delay=1, **changes)
    world = World(hparams, [Overlapping(16), Overlapping(16)], measures_loss=False)
    await world.run(WINDOWS)
    assert {one.train_state.digest() for one in world.members} == {world.train_state.digest()}
    evaluations = [one.evaluation for one in world.records[-1].seen.observations.values() if one.evaluation]
    assert evaluations
    losses = [(one.held_out.before, one.held_out.after) for one in evaluations]
    assert all(after and after < before for before, after in losses)
    assert not any(record.outcome.struck for record in world.records)
    assert await audit(world, tmp_path) is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, None),
        ({"skipped": "another reason"}, None),
        ({"skipped": {}}, "the included set: skipped uids"),
        ({"included": ()}, "the included set: updates"),
        ({"included": "a false size"}, "the included set: updates"),
        ({"success_rate": 0.125}, "the included set: success rate"),
    ],
)
async def test_the_published_set_is_compared(world: World, tmp_path: Path, monkeypatch, change: dict, what) -> None:
    """Reasons may differ: a node may have found the same updates, but other reasons, before the set arrived.

    The aggregate is requested only if the set, and so the aggregate's size, is right.
    """
    asked: list[IncludedSet] = []

    async def published(self: object, window: int) -> IncludedSet:
        report = await world.comms.get_report(VALIDATOR, window)
        found = reported_set(report, world.hparams.version, size=world.spec.expected_size)
        assert found.skipped
        reasons = dict.fromkeys(found.skipped, Reason.UNAVAILABLE)
        large = tuple(one.model_copy(update={"size": 2**50}) for one in found.included)
        made = {"skipped": reasons} if change.get("skipped") else {"included": large} if change.get("included") else {}
        return found.model_copy(update=change | made)

    async def not_there(self: object, included: IncludedSet) -> None:
        asked.append(included)

    monkeypatch.setattr(type(world.comms), "get_included", published)
    monkeypatch.setattr(type(world.comms), "get_aggregate", not_there, raising=False)
    found = await audit(world, tmp_path, until=START_WINDOW)
    assert (found and found.what) == what
    assert bool(asked) == (what is None)


async def unreachable(*_: object, **__: object) -> ObjectInfo:
    raise StoreUnavailable("no network")


async def test_peers_that_were_unreachable_are_no_difference(tmp_path: Path, caplog, monkeypatch) -> None:
    """The model of all later windows does not include that update, so the audit does not either."""
    hparams = small(profile("demo"), pages_per_window=1, evaluation_sequences=16, gather_patience_seconds=0.1)
    world = World(hparams, [Honest(8), Honest(8), Honest(8)])
    monkeypatch.setattr(world.by_uid[2].store, "head", unreachable)
    await world.run(1)
    monkeypatch.undo()
    await world.run(1)
    assert [sorted(world.records[window].outcome.struck) for window in (0, 1)] == [[], []]
    assert await audit(world, tmp_path, until=2) is None
    assert "window 1: uids [2] not verified: reported as unreachable" in caplog.text


async def test_what_is_not_there_now_is_no_difference(world: World, tmp_path: Path, monkeypatch) -> None:
    store = world.by_uid[2].store
    monkeypatch.setattr(store, "head", unreachable)
    with pytest.raises(StoreUnavailable, match="window 1: the update of uid 2, which was applied, can't be reached"):
        await audit(world, tmp_path, scores_from=LAST)
    monkeypatch.undo()
    key = gradient_key(2, 2, world.hparams.version)
    held = store._objects.pop(key)
    try:
        with pytest.raises(
            WindowLost, match=r"updates that no node can provide: uid 2, .* the miner has deleted the update"
        ):
            await audit(world, tmp_path, scores_from=LAST)
    finally:
        store._objects[key] = held


async def test_a_commit_that_is_missing_later_is_no_difference(world: World, tmp_path: Path, caplog) -> None:
    """Otherwise miners could incriminate the leading validator: the bytes of the update are still the applied ones."""
    store, key = world.by_uid[2].store, commit_key(2, 2, world.hparams.version)
    held = store._objects.pop(key)
    try:
        assert await audit(world, tmp_path) is None
    finally:
        store._objects[key] = held
    assert "window 2: uids [2]: commits not verified: deleted or replaced" in caplog.text


def changed(store: MemoryStore, key: str, where: int) -> None:
    """Change one byte of an object and keep its size and time; a hexadecimal digit stays a hexadecimal digit."""
    info, body = store._objects[key]
    body = body[:where] + bytes([body[where] ^ (2 if body[where] in b"af" else 1)]) + body[where + 1 :]
    etag = hashlib.md5(body, usedforsecurity=False).hexdigest()
    store._objects[key] = (replace(info, etag=etag), body)


@pytest.mark.parametrize(
    ("kind", "find", "what"),
    [
        ("debug", b'"fingerprint":"', "a report of validator 0"),
        ("debug", b'"signature":"', "a report of validator 0"),
        ("scores", b'"credit":', "a report of validator 0"),
        ("scores", b"{", "a report of validator 0"),
    ],
)
async def test_one_changed_byte_of_one_object_is_named(world, tmp_path, kind, find, what) -> None:
    version = world.hparams.version
    key = {"debug": debug_key(2, VALIDATOR, version), "scores": scores_key(2, VALIDATOR, version)}[kind]
    held = dict(world.bucket._objects)
    body = world.bucket._objects[key][1]
    changed(world.bucket, key, body.index(find) + len(find) if len(find) > 1 else 0)
    try:
        found = await audit(world, tmp_path, scores_from=2)
    finally:
        world.bucket._objects.clear()
        world.bucket._objects.update(held)
    assert found is not None
    assert (found.window, found.what) == (2, what)


async def test_a_changed_byte_of_an_update_is_its_miner_s(world: World, tmp_path: Path) -> None:
    """Its time stamp is within the bound, so it may have been written after the validator read the committed update."""
    store, key = world.by_uid[2].store, gradient_key(2, 2, world.hparams.version)
    held = store._objects[key]
    changed(store, key, len(held[1]) // 2)
    try:
        with pytest.raises(WindowLost, match=r"uid 2, .* its bucket now: hash_mismatch; .* the miner has deleted"):
            await audit(world, tmp_path, scores_from=LAST)
    finally:
        store._objects[key] = held


@pytest.mark.parametrize("what", ["fingerprint", "outer fingerprint", "proof", "digest", "update of uid 1"])
async def test_a_report_that_its_validator_signed_is_still_compared(world: World, tmp_path: Path, what: str) -> None:
    held = dict(world.bucket._objects)
    report = await world.comms.get_report(VALIDATOR, 2)
    field = what.replace(" ", "_")
    change = {field: "5e" * 32} if hasattr(report, field) else {"included": report.included | {"1": "5e" * 32}}
    key, lie = debug_key(2, VALIDATOR, world.hparams.version), report.model_copy(update=change)
    await put_document(world.bucket, key, lie, window=2, signer=world.signer)
    try:
        found = await audit(world, tmp_path, scores_from=2)
    finally:
        world.bucket._objects.update(held)
    assert found is not None
    assert (found.window, found.what) == (2, what)


async def seal(world: World, report: ScoreReport) -> None:
    await put_scores(world.bucket, report.sealed(), world.signer)


async def test_a_validator_that_seals_a_lie_is_found_out(world: World, tmp_path: Path) -> None:
    """One auditor finds all: a difference leaves it before the window."""
    held = dict(world.bucket._objects)
    report = await world.comms.get_scores(VALIDATOR, 3)
    assert report.alignment is not None
    friend = report.peer_scores["3"].model_copy(update={"final": 9.0})
    one = next(uid for uid, seen in report.observations.items() if seen.evaluation)
    other = next(uid for uid, seen in report.observations.items() if seen.included and not seen.sampled)
    seen = report.observations[one]
    assert seen.evaluation is not None
    assert seen.assigned_products
    # At most a fifth of the update's change, which is enough to change a miner's indicator.
    held_out = seen.evaluation.held_out
    better = held_out.model_copy(update={"after": (held_out.after or 0.0) - 5e-4})
    products = tuple(x + 0.01 for x in seen.assigned_products)

    def observed(uid: str, **changes: object) -> dict[str, object]:
        return {"observations": {**report.observations, uid: report.observations[uid].model_copy(update=changes)}}

    def aligned(**changes: object) -> dict[str, object]:
        return {"alignment": report.alignment.model_copy(update=changes)} if report.alignment else {}

    lies = {
        "peer score of uid 3": {"peer_scores": {**report.peer_scores, "3": friend}},
        "weights": {"weights": {"3": 1.0}},
        f"held-out loss of uid {one}, after": observed(
            one, evaluation=seen.evaluation.model_copy(update={"held_out": better})
        ),
        f"products on the pages of uid {one}": observed(one, assigned_products=products),
        "products": aligned(products=tuple(x + 0.01 for x in report.alignment.products)),
        "products after half of the step": aligned(middle=tuple(x + 0.01 for x in report.alignment.middle)),
        "number of products after half of the step": aligned(middle=()),  # as in a report of an earlier version
        "norms": aligned(norms=tuple(1.001 * x + 2e-6 for x in report.alignment.norms)),
        "gram": aligned(gram=tuple(x + 0.01 for x in report.alignment.gram)),
        "unit of products": aligned(unit=1.001 * report.alignment.unit),
        "largest honest norm": aligned(largest_norm=1.001 * (report.alignment.largest_norm or 1.0)),
        "held-out loss": aligned(loss=(report.alignment.loss or 0.0) - 5e-4),
        f"pages of uid {other}": observed(other, assigned_pages=False),
        f"uid {other} included": observed(other, included=False),
        "uid 7 included": observed("7", included=True),
        "verdict on uid 7": observed("7", verdict="missing"),  # instead of a reason that leads to a strike
        "sampled uids": observed(other, sampled=True),
        "earlier windows that the scores depend on": {"follows_from": ()},
    }
    auditor = new_auditor(world, tmp_path)
    assert await auditor.audit(LAST - 1, scores_from=LAST) is None
    for what, lie in [*lies.items(), ("held-out loss", aligned(loss=None))]:
        await seal(world, report.model_copy(update=lie))
        found = await auditor.audit(LAST)
        assert found is not None, what
        assert (found.window, found.what) == (LAST, what)
    world.bucket._objects.update(held)
    assert await auditor.audit(LAST) is None


@pytest.mark.parametrize(
    ("window", "changes"),
    [(2, {"before": 0.0}), (3, {})],
    ids=["no loss", "an update of nobody"],
)
async def test_evidence_that_contradicts_itself_is_a_difference(world, tmp_path, window: int, changes: dict) -> None:
    """No formula accepts its numbers, or it measures a miner without an observation: the audit reports it."""
    held = dict(world.bucket._objects)
    report = await world.comms.get_scores(VALIDATOR, window)
    assert report.alignment is not None
    observations = dict(report.observations)
    uid, seen = next((uid, seen) for uid, seen in observations.items() if seen.evaluation)
    assert seen.evaluation is not None
    if changes:
        loss = seen.evaluation.held_out.model_copy(update=changes)
        evaluation = seen.evaluation.model_copy(update={"held_out": loss})
        observations[uid] = seen.model_copy(update={"evaluation": evaluation})
    else:
        del observations[str(report.alignment.uids[-1])]
    await seal(world, report.model_copy(update={"observations": observations}))
    try:
        found = await audit(world, tmp_path, scores_from=LAST)
    finally:
        world.bucket._objects.update(held)
    assert found is not None
    assert (found.window, found.what) == (LAST, "evidence from which scores can be computed")


async def test_a_window_without_included_updates_has_no_products_after_half_of_its_step(tmp_path: Path) -> None:
    world = await asyncio.to_thread(build, probation_windows=2)
    report = await world.comms.get_scores(VALIDATOR, LAST)
    assert report.alignment is not None
    assert not any(seen.included for seen in report.observations.values())
    assert report.alignment.uids
    assert report.alignment.middle == ()
    assert await audit(world, tmp_path) is None
    lie = report.alignment.model_copy(update={"middle": report.alignment.products})
    await seal(world, report.model_copy(update={"alignment": lie}))
    found = await audit(world, tmp_path, scores_from=LAST)
    assert found is not None
    assert (found.window, found.what) == (LAST, "number of products after half of the step")


@pytest.mark.long
async def test_a_valid_update_on_probation_that_is_said_to_be_refused_is_found_out(tmp_path: Path) -> None:
    world = await asyncio.to_thread(build, probation_windows=2)
    held = dict(world.bucket._objects)
    report = await world.comms.get_scores(VALIDATOR, LAST)
    refused = {uid for uid, seen in report.observations.items() if seen.probation and seen.verdict != "valid"}
    assert refused == {"7", "8"}  # malformed, and late
    assert await audit(world, tmp_path) is None
    seen = report.observations["3"]
    assert seen.probation
    assert report.alignment is not None
    lie = seen.model_copy(update={"verdict": Reason.MISSING.value, "assigned_pages": None})
    await seal(world, report.model_copy(update={"observations": {**report.observations, "3": lie}}))
    found = await audit(world, tmp_path)
    assert found is not None
    assert (found.window, found.what, found.published) == (LAST, "verdict on uid 3", "missing")
    world.bucket._objects.update(held)


@pytest.mark.parametrize("sealed", [False, True])
async def test_windows_that_a_validator_leaves_out_are_listed(sealed, tmp_path: Path, caplog, monkeypatch) -> None:
    """It could leave out those in which a miner was absent: its scores follow from what it published."""
    world = await asyncio.to_thread(build, uids_per_window=8)
    report = await world.comms.get_scores(VALIDATOR, LAST)
    board = score_board(world.hparams)
    outcome = board.see(report.evidence)
    scores = {str(uid): one for uid, one in outcome.peer_scores.items()}
    weights = {str(uid): one for uid, one in board.weights.items()}
    changes = {"follows_from": (), "peer_scores": scores, "weights": weights}
    await seal(world, report.model_copy(update=changes))
    world.bucket._objects.pop(scores_key(LAST - 1, VALIDATOR, world.hparams.version))
    if sealed:  # scores are not sealed in this simulation
        read = world.comms.get_scores

        async def get_scores(uid: int, window: int) -> ScoreReport:
            if window == LAST - 1:
                raise ScoresSealed("only the hash", bucket="scores", key="sealed")
            return await read(uid, window)

        monkeypatch.setattr(world.comms, "get_scores", get_scores)
    assert await audit(world, tmp_path, scores_from=LAST) is None
    unseen = f"scores of windows [{LAST - 1}] stayed sealed" if sealed else f"no scores of windows [{LAST - 1}]"
    assert unseen in caplog.text


async def test_scores_whose_evidence_is_gone_are_not_verified(world: World, tmp_path: Path, caplog) -> None:
    key = scores_key(2, VALIDATOR, world.hparams.version)
    held = world.bucket._objects.pop(key)
    try:
        assert await audit(world, tmp_path, scores_from=LAST) is None
    finally:
        world.bucket._objects[key] = held
    assert "window 3: peer scores not verified: no report of windows [2]" in caplog.text

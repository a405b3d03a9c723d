"""Short form of ``scripts/simulate_attackers.py``: cheats in a network with real training; and audits of it."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from tplr.errors import PayloadError, StoreUnavailable, WindowLost
from tplr.exchange.aggregates import IncludedSet, reported_set
from tplr.exchange.documents import put_document
from tplr.hparams import load_hparams
from tplr.keys import debug_key, gradient_key, scores_key
from tplr.localnet.attackers import Changed, Copier, Honest, Late, Malformed, Repeater, malformed
from tplr.localnet.plan import PROFILE
from tplr.localnet.simulation import START_WINDOW, VALIDATOR, World, small
from tplr.node.audit import Auditor
from tplr.node.train_state import TrainState
from tplr.schemas import OUT_OF_SYNC, ObjectInfo, Reason
from tplr.storage import MemoryStore
from tplr.training.model import build_model

WINDOWS = 3
LAST = WINDOWS


@pytest.fixture(scope="module")
def world() -> World:
    hparams = small(load_hparams(PROFILE), pages_per_window=2, evaluation_sequences=16, peer_replacement_frequency=50)
    members = [
        Honest(16),
        Honest(4),
        Changed("signs flipped", 8, lambda one, _: -one),
        Changed("scaled by 1e6", 8, lambda one, _: 1e6 * one),
        Copier("copier", 1),
        Repeater("stale repeater", 4),
        Malformed("malformed", 4),
        Late("late by one second", 4),
    ]
    world = World(hparams, members)
    asyncio.run(world.run(WINDOWS))
    return world


def struck(world: World, uid: int) -> set[str]:
    return {code for record in world.records for code in record.outcome.struck.get(uid, ())}


async def test_each_cheat_is_struck_by_its_rule_and_no_honest_miner_by_any(world: World) -> None:
    assert struck(world, 1) == struck(world, 2) == set()
    assert "outsized" in struck(world, 4)
    assert "copied_indices" in struck(world, 5)
    assert "stale" in struck(world, 6)
    assert struck(world, 7) & {"malformed", "wrong_size"}
    assert struck(world, 8) == {"late"}
    peer_scores = world.board.peer_scores
    assert peer_scores[3].signs == (-1,) * WINDOWS
    assert all(peer_scores[uid].mu < peer_scores[2].mu for uid in (3, 7, 8))
    assert world.held_out_loss() < (world.records[0].loss or 0.0)


def test_there_are_twenty_ways_and_each_is_refused(world: World) -> None:
    member = world.by_uid[7]
    body = Honest.body(member, world, LAST)
    assert body is not None
    assert world.parse(body, LAST, 7).uid == 7
    ways = list(malformed(body, world, 7, LAST))
    assert len(ways) == len({*ways}) == 20
    for way in ways:
        with pytest.raises(PayloadError):
            world.parse(way, LAST, 7)


async def audit(world: World, tmp_path: Path, until: int = LAST):
    train_state = TrainState(build_model(world.hparams), world.hparams, tmp_path)
    train_state.start_window = START_WINDOW
    auditor = Auditor(train_state, START_WINDOW, world.data_loader, world.comms, world.hparams, validator=VALIDATOR)
    return await auditor.audit(until, scores_from=START_WINDOW)


async def test_an_audit_of_an_honest_validator_agrees(world: World, tmp_path: Path) -> None:
    assert await audit(world, tmp_path) is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, None),
        ({"skipped": "another reason"}, None),
        ({"skipped": {}}, "the included set: who is skipped"),
        ({"included": ()}, "the included set: updates"),
        ({"success_rate": 0.125}, "the included set: success rate"),
    ],
)
async def test_the_published_set_is_compared(world: World, tmp_path: Path, monkeypatch, change: dict, what) -> None:
    """Reasons may differ: a node may have found the same updates, but other reasons, before the set came."""

    async def published(self: object, window: int) -> IncludedSet:
        report = await world.comms.get_report(VALIDATOR, window)
        found = reported_set(report, world.hparams.version, size=world.spec.expected_size)
        assert found.skipped
        reasons = dict.fromkeys(found.skipped, Reason.UNAVAILABLE)
        return found.model_copy(update=change | ({"skipped": reasons} if change.get("skipped") else {}))

    async def not_there(self: object, included: IncludedSet) -> None:
        return None

    monkeypatch.setattr(type(world.comms), "get_included", published)
    monkeypatch.setattr(type(world.comms), "get_aggregate", not_there, raising=False)
    found = await audit(world, tmp_path, until=START_WINDOW)
    assert (found and found.what) == what


async def unreachable(*_: object, **__: object) -> ObjectInfo:
    raise StoreUnavailable("no network")


async def test_peers_that_were_unreachable_are_no_difference(tmp_path: Path, caplog, monkeypatch) -> None:
    """The model of all later windows is without that update, so an audit is, too."""
    hparams = small(load_hparams(PROFILE), pages_per_window=1, evaluation_sequences=16, gather_patience_seconds=0.1)
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
        await audit(world, tmp_path)
    monkeypatch.undo()
    key = gradient_key(2, 2, world.hparams.version)
    held = store._objects.pop(key)
    try:
        with pytest.raises(WindowLost, match="window 2: the update of uid 2, which was applied, is deleted"):
            await audit(world, tmp_path)
        monkeypatch.setattr(world.comms.clock, "window", LAST + 1)  # nobody need have deleted anything yet
        found = await audit(world, tmp_path)
    finally:
        store._objects[key] = held
    assert found is not None
    assert (found.window, found.what, found.found) == (2, "update of uid 2", "missing")


def changed(store: MemoryStore, key: str, where: int) -> None:
    """One byte of an object, another one, with a size and a time as before; a hexadecimal digit stays one."""
    info, body = store._objects[key]
    body = body[:where] + bytes([body[where] ^ (2 if body[where] in b"af" else 1)]) + body[where + 1 :]
    etag = hashlib.md5(body, usedforsecurity=False).hexdigest()
    store._objects[key] = (replace(info, etag=etag), body)


@pytest.mark.parametrize(
    ("kind", "find", "what"),
    [
        ("gradient", b"", "update of uid 2"),
        ("debug", b'"fingerprint":"', "fingerprint"),
        ("debug", b'"proof":"', "proof"),
        ("debug", b'"digest":"', "digest"),
        ("debug", b'"included":{"1":"', "update of uid 1"),
        ("scores", b'"random_after":', "seal of the score report"),
        ("scores", b'"mu":', "seal of the score report"),
        ("scores", b"{", "a report of validator 0"),
    ],
)
async def test_one_changed_byte_of_one_object_is_named(world, tmp_path, kind, find, what) -> None:
    version = world.hparams.version
    store = world.by_uid[2].store if kind == "gradient" else world.bucket
    key = {
        "gradient": gradient_key(2, 2, version),
        "debug": debug_key(2, VALIDATOR, version),
        "scores": scores_key(2, VALIDATOR, version),
    }[kind]
    held = dict(store._objects)
    body = store._objects[key][1]
    changed(store, key, body.index(find) + len(find) if len(find) > 1 else len(body) // 2 if not find else 0)
    try:
        found = await audit(world, tmp_path)
    finally:
        store._objects.clear()
        store._objects.update(held)
    assert found is not None
    assert (found.window, found.what) == (2, what)


async def test_a_validator_that_seals_a_lie_is_found_out(world: World, tmp_path: Path) -> None:
    key = scores_key(3, VALIDATOR, world.hparams.version)
    held = world.bucket._objects[key]
    report = await world.comms.get_scores(VALIDATOR, 3)
    friend = report.peer_scores["3"].model_copy(update={"final": 9.0})
    measured = report.observations["1"].evaluation
    assert measured is not None
    # No more than a fifth of what the update changes: enough to make somebody's indicator another one.
    better = measured.model_copy(update={"random_after": measured.random_after - 5e-4})
    lies = {
        "peer score of uid 3": {"peer_scores": {**report.peer_scores, "3": friend}},
        "weights": {"weights": {"3": 1.0}},
        "random after of uid 1": {
            "observations": {
                **report.observations,
                "1": report.observations["1"].model_copy(update={"evaluation": better}),
            }
        },
    }
    for what, lie in lies.items():
        body = report.model_copy(update=lie).sealed().model_dump_json().encode()
        await world.bucket.put(key, body)
        found = await audit(world, tmp_path)
        assert found is not None
        assert (found.window, found.what) == (3, what)
    world.bucket._objects[key] = held


async def test_a_copied_proof_is_none(world: World) -> None:
    """Two nodes that hold the same model prove it differently: what one published is of no use to another."""
    observer, newest, key = world._observer, LAST - 1, debug_key(LAST - 1, 2, world.hparams.version)
    assert await observer._behind(1, newest) == 0
    held = world.by_uid[2].store._objects[key]
    copied = await world.comms.get_report(1, newest)
    await put_document(world.by_uid[2].store, key, copied.model_copy(update={"uid": 2}))
    assert await observer._behind(2, newest) == OUT_OF_SYNC
    del world.by_uid[2].store._objects[key]  # no report of that window: the one before shows that it is a step behind
    assert await observer._behind(2, newest) == 1
    world.by_uid[2].store._objects[key] = held

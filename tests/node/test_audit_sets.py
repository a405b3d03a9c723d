"""A set that one elector decided alone: miners that deleted or replaced applied updates can't incriminate it.

A validator with a real key, bucket and chain, and three miners with commits and updates on a real S3 server, dated by
the chain's clock. A validator that claims false facts is detected if buckets contradict it, and named if they do not.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from deciding import publish_decision
from included import included_set
from recording import Recording

from tplr.clock import first_block
from tplr.errors import TplrError
from tplr.exchange.aggregates import IncludedSet, reported_set
from tplr.keys import commit_key, debug_key, gradient_key, state_key
from tplr.localnet.plan import BLOCK_SECONDS
from tplr.node.audit import Auditor, Difference
from tplr.node.audit_sets import Mismatch
from tplr.node.elector import FINAL_BLOCKS
from tplr.node.replica import NodeContext
from tplr.node.train_state import TrainState
from tplr.schemas import ObjectInfo, PeerList, Reason
from tplr.testing.s3server import Status
from tplr.training.model import build_model

START = 2
NOBODY_S = "5e" * 32  # a hash of nothing


class Scene:
    """A recorded run of one elector and three miners, the third of them in reserve, and an auditor."""

    def __init__(self, stage: Any, recording: Recording, nodes: dict[str, NodeContext], folder: Path) -> None:
        self.stage = stage
        self.recording = recording
        self.nodes = nodes
        self._folder = folder

    @property
    def validator(self) -> Any:
        return self.nodes["validator"].comms

    async def record(self, **what: Any) -> None:
        """Record a window; miners commit early in it, and upload when the block after it is final."""
        window = self.recording.window
        await self._pass_to(window)
        await self.recording.record(ends=lambda: self._pass_to(window + 1), **what)

    async def pass_time(self) -> None:
        """Let time pass until every bound is over and the window is no longer the last one."""
        await self._pass_to(self.recording.window + 1)

    async def _pass_to(self, window: int) -> None:
        """Let time pass until all nodes have seen the first block of a window and it is final."""
        block = first_block(window, self.stage.hparams.blocks_per_window) + FINAL_BLOCKS
        while (head := await self.validator.chain.head()) < block:
            self.stage.clock.advance((block - head) * BLOCK_SECONDS)
        for one in self.nodes.values():
            await one.clock.wait_for_block(block)

    async def claims(self, window: int, **lie: Any) -> None:
        """Let the validator sign another report of a window, and the matching decision."""
        made = (await self.validator.get_report(self.validator.uid, window)).model_copy(update=lie)
        await self.validator.put_report(made)
        size = self.recording.train_state.outer.spec.expected_size
        await publish_decision([self.validator], reported_set(made, self.stage.hparams.version, size=size))

    @property
    def decided_before(self) -> IncludedSet:
        """Return the set of all updates of the last window, decided before the window was voided."""
        assert self.recording.found is not None
        return included_set(self.recording.found, self.stage.hparams.version)

    def key(self, kind: str, window: int, uid: int) -> str:
        make = {"gradient": gradient_key, "commit": commit_key}[kind]
        return make(window, uid, self.stage.hparams.version)

    def store(self, uid: int) -> Any:
        return self.nodes[f"miner-{uid}"].comms.own_store

    async def delete(self, window: int, uid: int, *kinds: str) -> None:
        for kind in kinds:
            await self.store(uid).delete(self.key(kind, window, uid))

    async def replace(self, window: int, uid: int) -> None:
        """Replace an update with another one of the same size."""
        key = self.key("gradient", window, uid)
        body = await self.store(uid).get(key, max_bytes=2**24)
        await self.store(uid).put(key, body[:-1] + bytes([body[-1] ^ 1]))

    async def no_aggregate(self, window: int) -> None:
        await self.validator.own_store.delete(state_key("aggregator", window, 0, self.stage.hparams.version))

    async def audit(self, until: int = START) -> tuple[Difference | None, str]:
        """Return the difference and the believed claims; raises the errors that end ``tplr audit`` with status 2."""
        await self.pass_time()
        auditor = self.auditor()
        return await auditor.audit(until, scores_from=until + 1), "\n".join(auditor.unverified)

    def auditor(self) -> Auditor:
        """Audit by a node without a vote, from the run's first weights."""
        comms, hparams = self.nodes["miner-3"].comms, self.stage.hparams
        train_state = TrainState(build_model(hparams), hparams, self._folder)
        train_state.start_window = START
        return Auditor(train_state, START, cast(Any, None), comms, hparams, validator=self.validator.uid)


@pytest.fixture
async def scene(staged: Any, tmp_path: Path) -> AsyncIterator[Scene]:
    constants = {
        "blocks_per_window": 20,
        "time_window_delta_seconds": 4,
        "manifest_timeout_seconds": 0.1,
        "gather_patience_seconds": 0.1,
    }
    async with staged(miners=3, by_hand=True, dated_by_hand=True, **constants) as stage:
        names = ("validator", "miner-1", "miner-2", "miner-3")
        nodes = {name: await stage.context(stage.setup(name)) for name in names}
        async with stage.running(*(one.clock.run() for one in nodes.values())):
            for one in nodes.values():
                await one.clock.wait_for_block(1)
                await one.comms.refresh()
            leader, *miners = (nodes[name].comms for name in names)
            assert [one.uid for one in miners] == [1, 2, 3]
            recording = Recording(leader, miners[:2], stage.hparams, start=START, folder=tmp_path / "recording")
            listed = PeerList(
                peers=(1, 2),
                reserve_peers=(3,),
                initial_selection=True,
                sync_window=START,
                first_effective_window=START,
            )
            await leader.post_peer_list(listed)
            await leader.post_start_window(START)
            scene = Scene(stage, recording, nodes, tmp_path / "audit")
            await scene.record()
            yield scene


async def test_an_honest_set_agrees_and_nothing_is_believed(scene: Scene) -> None:
    assert await scene.audit() == (None, "")


async def test_what_miners_take_away_is_in_the_aggregate(scene: Scene) -> None:
    """An update deleted with its commit, or replaced."""
    await scene.pass_time()
    await scene.delete(START, 1, "gradient", "commit")
    await scene.replace(START, 2)
    found, believed = await scene.audit()
    assert found is None
    of_whom = "its bytes are from the electors, and"
    assert f"uid 1: its bucket now: missing; {of_whom} no commit shows that the miner published them" in believed
    assert f"uid 2: its bucket now: too_late; {of_whom} its commit names this hash" in believed


async def test_an_update_that_was_replaced_within_the_bound_frames_nobody(scene: Scene) -> None:
    await scene.replace(START, 1)
    found, believed = await scene.audit()
    assert found is None
    assert "uid 1: its bucket now: hash_mismatch; its bytes are from the electors, and its commit names" in believed


@pytest.mark.parametrize("taken", [("gradient",), ("gradient", "commit")])
async def test_an_update_that_no_node_provides_can_not_be_checked(scene: Scene, taken: tuple[str, ...]) -> None:
    """The miner's commit shows that the miner removed it; without a commit, the audit names it as unavailable."""
    await scene.delete(START, 1, *taken)
    await scene.no_aggregate(START)
    with pytest.raises(TplrError, match="claims updates that no node can provide: uid 1, sha256") as refused:
        await scene.audit()
    known = "the miner has deleted the update" in str(refused.value)
    assert known == (taken == ("gradient",))
    assert "publish no aggregate of this set" in str(refused.value)


async def test_all_else_of_its_set_is_compared_before(scene: Scene) -> None:
    await scene.delete(START, 1, "gradient", "commit")
    await scene.no_aggregate(START)
    report = await scene.validator.get_report(scene.validator.uid, START)
    await scene.claims(START, included={"1": report.included["1"], "2": NOBODY_S})
    found, _ = await scene.audit()
    assert found == Difference(START, "update of uid 2", NOBODY_S, f"{report.included['2']}, by its commit")


async def test_a_hash_that_was_never_committed_is_found_out(scene: Scene) -> None:
    """Also if the validator publishes an aggregate with that hash, and the miner has deleted its update."""
    await scene.delete(START, 2, "gradient")
    report = await scene.validator.get_report(scene.validator.uid, START)
    await scene.claims(START, included={**report.included, "2": NOBODY_S})
    found, _ = await scene.audit()
    assert found == Difference(START, "update of uid 2", NOBODY_S, f"{report.included['2']}, by its commit")


async def test_a_commit_in_parts_shows_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time may be that of the upload's start, so the validator need not have found it."""
    await scene.delete(START, 2, "gradient")
    report = await scene.validator.get_report(scene.validator.uid, START)
    await scene.claims(START, included={**report.included, "2": NOBODY_S})
    auditor = scene.nodes["miner-3"].comms
    real = auditor.get_commit

    async def in_parts(uid: int, window: int) -> ObjectInfo:
        commit = await real(uid, window)
        return replace(commit, etag=f"{commit.etag}-1")

    monkeypatch.setattr(auditor, "get_commit", in_parts)
    with pytest.raises(TplrError, match="no commit shows whether"):
        await scene.audit()


async def test_a_uid_that_never_sent_anything_is_named(scene: Scene) -> None:
    """The miner may have deleted everything, so this is no proof; no other claim contradicts the validator's."""
    await scene.delete(START, 2, "gradient", "commit")
    report = await scene.validator.get_report(scene.validator.uid, START)
    await scene.claims(START, included={**report.included, "2": NOBODY_S})
    with pytest.raises(TplrError) as refused:
        await scene.audit()
    assert f"uid 2, sha256 {NOBODY_S[:12]}…; its bucket now: missing; no commit shows whether" in str(refused.value)


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        ({"included": {"1": "", "2": "", "3": NOBODY_S}}, "update of uid 3"),  # of the reserve, with no peer missing
        ({"included": {"1": "", "2": "", "77": NOBODY_S}}, "update of uid 77"),
        ({"included": {"1": ""}, "skipped": {"2": Reason.MISSING}}, "update of uid 2"),
        ({"included": {"1": ""}, "skipped": {}}, "why uid 2 is not included"),
        ({"skipped": {"3": Reason.MISSING}}, "why uid 3 is not included"),
        ({"skipped": {"77": Reason.UNAVAILABLE}}, "why uid 77 is not included"),
    ],
)
async def test_a_set_that_was_not_there_is_found_out(scene: Scene, lie: dict[str, Any], what: str) -> None:
    report = await scene.validator.get_report(scene.validator.uid, START)
    true = {uid: sha256 or report.included[uid] for uid, sha256 in lie.get("included", report.included).items()}
    await scene.claims(START, **(lie | {"included": true}))
    found, _ = await scene.audit()
    assert found is not None
    assert found.what == what


@pytest.mark.parametrize("reason", [Reason.UNAVAILABLE, Reason.DENIED, Reason.MISSING])
async def test_a_bucket_that_was_closed_and_is_open_now_frames_nobody(scene: Scene, reason: Reason) -> None:
    """Only the validator knows whether it was closed. Time stamps show if a bucket was open and empty."""
    window = scene.recording.window
    await scene.record(applied=1)
    report = await scene.validator.get_report(scene.validator.uid, window)
    assert sorted(report.included) == ["1"]
    await scene.claims(window, skipped={"2": reason})
    found, believed = await scene.audit(until=window)
    if reason is Reason.MISSING:
        assert found is not None
        assert (found.what, found.published) == ("update of uid 2", "missing")
    else:
        assert found is None
        assert "uids [2] not verified: reported as unreachable, or closed to it" in believed


async def test_a_reserve_that_was_passed_over_is_named(scene: Scene) -> None:
    """Its bucket may not have answered, and reports do not give the reason why a reserve peer is not included."""
    window = scene.recording.window
    first = {"initial_selection": False, "sync_window": START, "first_effective_window": window}
    await scene.validator.post_peer_list(PeerList(peers=(1, 3), reserve_peers=(2,), **first))
    await scene.record(applied=1)
    await scene.claims(window, skipped={"3": Reason.MISSING})
    found, believed = await scene.audit(until=window)
    assert found is None
    assert f"window {window}: uids [2] of the reserve not verified: skipped as if unreachable" in believed


async def test_a_window_that_its_only_elector_voided_later_is_applied_as_nothing(scene: Scene) -> None:
    """It claims to have lost an update; the other one is still in its bucket, which does not contradict the claim."""
    window = scene.recording.window
    await scene.record(void=True)
    await publish_decision([scene.validator], scene.decided_before)
    await scene.record(voided=(window,))
    found, believed = await scene.audit(until=window + 1)
    assert found is None
    assert f"window {window}: not verified: voided by its only elector, which reports a lost update" in believed


async def test_who_has_not_rolled_back_yet_is_no_liar(scene: Scene) -> None:
    window = scene.recording.window
    await scene.record(void=True)
    await publish_decision([scene.validator], scene.decided_before)
    decided = {str(one.uid): one.sha256 for one in scene.decided_before.included}
    report = await scene.validator.get_report(scene.validator.uid, window)
    await scene.validator.put_report(report.model_copy(update={"included": decided}))
    await scene.record(voided=(window,))
    with pytest.raises(TplrError, match=f"window {window} was voided later, and validator 0 has not rolled back"):
        await scene.audit(until=window + 1)
    await scene.validator.put_report(report.model_copy(update={"included": {"1": decided["1"]}}))
    found, _ = await scene.audit(until=window + 1)  # neither the earlier decision nor an empty set
    assert found is not None
    assert (found.window, found.what) == (window, "update of uid 1")


async def test_a_bucket_that_does_not_answer_now_has_its_bytes_in_the_aggregate(scene: Scene) -> None:
    bucket = scene.stage.setup("miner-1").account.name
    scene.stage.server.faults.add(f"(GET|HEAD) /{bucket}[/?]", Status(503, "SlowDown"), times=None)
    found, believed = await scene.audit()
    assert found is None
    assert "uid 1: its bucket now: unavailable; its bytes are from the electors" in believed
    await scene.no_aggregate(START)
    with pytest.raises(TplrError, match="the update of uid 1, which was applied, can't be reached now"):
        await scene.audit()


async def test_an_aggregate_that_is_none_is_held_against_its_author_alone(scene: Scene) -> None:
    await scene.pass_time()
    report = await scene.validator.get_report(scene.validator.uid, START)
    key = state_key("aggregator", START, 0, scene.stage.hparams.version)
    own, others = scene.validator.own_store, scene.store(3)
    body = await own.get(key, max_bytes=2**24)
    await own.delete(key)
    await others.put(key, body[:-1] + bytes([body[-1] ^ 1]))
    scene.nodes["miner-3"].comms._aggregates = others
    auditor = scene.auditor()
    await auditor._check_published(report, aggregate=True)
    assert "aggregate not compared, the stored one is invalid" in auditor.unverified[0]
    await own.put(key, body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(Mismatch, match="the aggregate"):
        await auditor._check_published(report, aggregate=True)


async def test_without_a_peer_list_nothing_is_held_against_anybody(scene: Scene) -> None:
    """The current electors should have it, and may differ from those of that time."""
    for info in await scene.validator.own_store.list("peers_"):
        await scene.validator.own_store.delete(info.key)
    with pytest.raises(TplrError, match=f"window {START} not verified: no peer list is readable"):
        await scene.audit()


async def test_reports_of_who_had_the_uid_before_are_not_those_of_who_has_it(scene: Scene, monkeypatch: Any) -> None:
    key = debug_key(START, scene.validator.uid, scene.stage.hparams.version)
    body = await scene.validator.own_store.get(key, max_bytes=2**20)
    await scene.validator.own_store.put(key, body.replace(b'"fingerprint":"', b'"fingerprint":"0'))
    found, _ = await scene.audit()
    assert found is not None
    assert found.what == "a report of validator 0"

    async def hotkeys_in(_: int) -> dict[int, str]:
        return {scene.validator.uid: "another"}

    monkeypatch.setattr(scene.nodes["miner-3"].comms, "hotkeys_in", hotkeys_in)
    with pytest.raises(TplrError, match=f"window {START} not verified: uid 0 had another hotkey then, another"):
        await scene.audit()

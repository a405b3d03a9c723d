"""``tplr page`` on a recorded run: objects read from honest and hostile buckets and a chain, and data kept."""

import argparse
import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from guides import GuideCommand, from_guide
from recording import Recording, recorded_run
from reports import score_report

from tplr import cli
from tplr.chain.ledger import Ledger
from tplr.config import Environment
from tplr.errors import ConfigError, StoreError
from tplr.exchange.envelope import body_of, sign_body, sign_document
from tplr.exchange.scores import seal_of
from tplr.keys import debug_key, evaluation_key, page_document_key, page_key, scores_key
from tplr.localnet.accounts import bucket_variables
from tplr.localnet.network import node_command, node_environment
from tplr.node.arguments import Arguments, add_arguments, node_arguments
from tplr.node.audit_stamps import AuditStamp, append_stamp
from tplr.node.network_reader import NetworkReader
from tplr.node.replica import NodeContext
from tplr.page.command import PageMaker, PageRequest, make_page
from tplr.page.document import RunDocument
from tplr.page.sentences import unpack
from tplr.run.results import result_path, write_result
from tplr.schemas import (
    Alignment,
    DocumentedScore,
    Evaluation,
    EvaluationResult,
    HeldOutLoss,
    LossChange,
    PeerObservation,
    PeerScore,
    ScoreReport,
    WeightsSet,
)
from tplr.scoring.explain import explain, measured_window, shares_of
from tplr.storage.base import ObjectStore
from tplr.telemetry import Telemetry
from tplr.telemetry.jsonl import JsonlListener
from tplr.testing.s3server.faults import Status

START = 3
HOSTILE = "</script><script>alert(1)</script>\u2028\u2029"


class Scene:
    """A run of two miners whose windows are recorded, and a reader of it."""

    def __init__(self, stage, recording: Recording, leader: NodeContext, miners: tuple[NodeContext, ...]) -> None:
        self.stage = stage
        self.recording = recording
        self.leader = leader
        self.miners = miners
        self.request = PageRequest(
            network=arguments(),
            out=stage.folder("out") / "page.html",
            json=stage.folder("out") / "page.json",
            history=stage.folder("out") / "history.jsonl",
        )

    @property
    def store(self) -> ObjectStore:
        return self.leader.comms.own_store

    async def record(self, **what) -> None:
        while self.leader.clock.window <= self.recording.window:
            await self.stage.pass_windows(1, self.leader.clock)
        await self.stage.drive(self.recording.record(**what))

    async def reports(self, window: int, node: NodeContext, **changes) -> None:
        """Publish the leader's report as this node's, with ``changes``."""
        seen = await self.leader.comms.get_report(self.leader.comms.uid, window)
        await node.comms.put_report(seen.model_copy(update={"uid": node.comms.uid, **changes}))

    async def maker(self, request: PageRequest, **variables: str) -> PageMaker:
        comms = self.leader.comms
        await comms.refresh()
        environment = Environment({"TPLR_S3_ENDPOINT": self.stage.server.endpoint, **variables})
        network = NetworkReader(request.network, environment, comms._connections, self.stage.hparams, comms)
        return await self.stage.drive(PageMaker.open(request, network))

    async def write(
        self, request: PageRequest | None = None, maker: PageMaker | None = None, **variables: str
    ) -> RunDocument:
        request = request or self.request
        await self.stage.drive((maker or await self.maker(request, **variables)).write())
        assert request.json
        return RunDocument.model_validate_json(request.json.read_bytes())


def arguments(*given: str) -> Arguments:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return node_arguments(parser.parse_args(given, argparse.Namespace(command="page")))


def request_of(command: GuideCommand, *more: object) -> PageRequest:
    """Return the request that ``tplr page`` parses from its command line."""
    requests: list[PageRequest] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tplr.page.command.main", lambda request, _: requests.append(request) or 0)
        assert cli.main([*command.arguments, *map(str, more)]) == 0
    return requests[0]


@pytest.fixture
async def scene(staged) -> AsyncIterator[Scene]:
    async with recorded_run(staged, start=START, sealed_scores=True) as run:
        yield Scene(*run)


def report(window: int, **changes) -> ScoreReport:
    seen = {
        "observations": {"1": PeerObservation(hotkey="somebody", listed=True, included=True, verdict="valid")},
        "peer_scores": {"1": PeerScore(hotkey="somebody", presence=1.0, credit=0.5, final=0.5)},
        "weights": {"1": 1.0},
        "weights_set": WeightsSet(block=14, intended={"1": 1.0}, on_chain={"1": 0.75, "77": 0.25, HOSTILE: 1.0}),
    }
    return score_report(window, **seen | changes).sealed()


async def publish(scene: Scene, made: ScoreReport) -> None:
    await scene.leader.comms.put_scores_seal(seal_of(made, weights_due=made.window + 2))
    await scene.leader.comms.put_scores(made)


async def test_a_run_that_has_not_started(scene) -> None:
    with pytest.raises(ConfigError, match="the run has not started"):
        await scene.write()
    assert not scene.request.out.exists()


async def test_a_void_window_is_shown_as_one(scene) -> None:
    await scene.recording.begin()
    await scene.record()
    await scene.record(void=True)
    found = await scene.write()
    assert found.elections
    assert found.elections.decided == "cv"
    assert {miner.outcomes[0] for miner in found.miners} == {"i"}
    assert "i" not in {miner.outcomes[1] for miner in found.miners}


async def test_a_set_without_a_decision_is_that_of_most_stake(scene) -> None:
    await scene.recording.begin()
    await scene.record(included=False)
    seen = await scene.leader.comms.get_report(0, START)
    await scene.reports(START, scene.leader, included={"1": seen.included["1"]})
    request = replace(scene.request, history=None)
    assert [(one.uid, one.outcomes) for one in (await scene.write(request)).miners] == [(1, "i")]
    for node in scene.miners:
        await node.comms.copy_run(scene.stage.hparams.start_horizon_windows)
        await node.comms.put_report(seen.model_copy(update={"uid": node.comms.uid}))
    with contextlib.closing(Ledger(scene.stage.network.chain, clock=scene.stage.clock)) as admin:
        for node in scene.miners:
            admin.set_stake(node.comms.hotkey, 0.9 * scene.leader.comms.metagraph.neurons[0].stake)
            admin.set_permit(node.comms.hotkey)
    await scene.stage.pass_windows(1, scene.leader.clock)
    assert [(one.uid, one.outcomes) for one in (await scene.write(request)).miners] == [(1, "i"), (2, "i")]


async def test_what_is_read_of_a_run(scene) -> None:
    await scene.recording.begin()
    await scene.record()
    await scene.record(senders=1)
    await scene.record(included=False)
    await scene.recording.checkpoint()
    made = report(START)
    await publish(scene, made)
    sealed = report(START + 1, struck={"1": ("wrong_pages",)})
    await scene.leader.comms.put_scores_seal(seal_of(sealed, weights_due=9))
    one, other = scene.miners
    await scene.reports(START, one)
    await scene.reports(START, other, fingerprint="f" * 64)

    found = await scene.write()
    assert (found.windows.first, found.windows.count, found.run.start_window) == (START, 3, START)
    assert [(miner.uid, miner.outcomes) for miner in found.miners] == [(1, "iii"), (2, "i.i")]
    assert {node.uid: node.models for node in found.nodes} == {0: "===", 1: "=..", 2: "x.."}
    assert [one.window for one in found.agreement.disagreements] == [START]
    assert found.elections
    assert found.elections.decided == "cc."
    assert [(one.uid, one.stake, one.votes) for one in found.elections.electors] == [(0, 1.0, "yy.")]
    batch = scene.stage.hparams.batch_size * scene.stage.hparams.sequence_length
    assert found.windows.tokens == (2 * batch, batch, 2 * batch)
    starts = [(await scene.leader.comms.window_start(START + at)).time for at in range(3)]
    assert found.windows.starts == tuple(starts)
    # The sentences of ``explain``, or the reason why there are none.
    shown = unpack(found.explanations, 1, 0)
    assert shown
    power = scene.stage.hparams.power_normalisation
    shares = shares_of(made, [measured_window(made, scene.stage.hparams)], scene.stage.hparams.probation_windows)
    expected = explain(made, 1, power=power, shares=shares).splitlines()[2:]
    assert expected == [f"{name:<18}{text}" for name, text in shown]
    assert found.windows.sealed[START + 1].startswith(f"the scores of window {START + 1} are sealed")
    assert found.windows.sealed[START + 2] == f"validator 0 has published no scores of window {START + 2}"
    assert found.miners[0].pay == (1.0, None, None)
    assert [(one.block, one.window, one.weights) for one in found.payments] == [(14, 3, {1: 0.75})]
    assert [(one.window, one.uid, one.kept) for one in found.checkpoints] == [(START + 3, 0, True)]
    assert found.checkpoints[0].bytes > 1000

    # The next poll opens sealed reports, and requests no more than necessary.
    await scene.leader.comms.put_scores(sealed)
    later = await scene.write()
    assert later.miners[0].pay == (1.0, 1.0, None)
    assert [(one.window, one.uid, one.rule) for one in later.strikes] == [(START + 1, 1, "wrong_pages")]

    # Objects disappear from buckets, but not from the history.
    for info in await scene.store.list():
        if info.key.startswith(("debug-", "scores-", "aggregator-", "checkpoint-")):
            await scene.store.delete(info.key)
    kept = await scene.write()
    assert kept.miners == later.miners
    assert kept.agreement == later.agreement
    assert [one.kept for one in kept.checkpoints] == [False]


async def test_a_uid_that_changes_hands_is_two_miners(scene) -> None:
    await scene.recording.begin()
    for _ in range(3):
        await scene.record()
    newcomer = scene.miners[1]
    # The newcomer also signs reports of windows in which the uid was another's.
    for window in range(START, START + 3):
        await scene.reports(window, newcomer, fingerprint="f" * 64)
    owner, block = newcomer.comms.hotkey, (START + 2) * scene.stage.hparams.blocks_per_window + 1
    with contextlib.closing(sqlite3.connect(scene.stage.network.chain)) as chain, chain:
        chain.execute("UPDATE neuron SET hotkey = 'former' WHERE uid = 2")
        chain.execute("INSERT INTO neuron (block, uid, hotkey, coldkey) VALUES (?, 2, ?, 'cold')", [block, owner])
    scene.leader.comms._directories.clear()
    await publish(scene, report(START, peer_scores={"2": PeerScore(hotkey="former")}, weights={"2": 1.0}))
    found = await scene.write()
    assert [(one.hotkey, one.outcomes) for one in found.miners[1:]] == [("former", "ii-"), (owner, "--i")]
    assert [one.pay for one in found.miners[1:]] == [(1.0, None, None), (None, None, None)]
    assert [(one.hotkey, one.models) for one in found.nodes[2:]] == [("former", "..-"), (owner, "--x")]


async def test_windows_without_scores_are_read_again_only_if_there_are_new_ones(scene, monkeypatch) -> None:
    monkeypatch.setattr("tplr.page.command.UNSETTLED_WINDOWS", 1)
    await scene.recording.begin()
    for _ in range(4):
        await scene.record()
    maker = await scene.maker(scene.request)
    asked: list[str] = []
    take = scene.stage.server.faults.take
    monkeypatch.setattr(
        scene.stage.server.faults, "take", lambda method, target: asked.append(target) or take(method, target)
    )

    async def read() -> list[int]:
        """Write the page; return the windows whose reports were read."""
        asked.clear()
        await scene.write(maker=maker)
        return [window for window in range(START, START + 4) if any(debug_key(window, 0, "1") in one for one in asked)]

    newest = START + 3
    assert await read() == [START, START + 1, START + 2, newest]
    assert await read() == [newest]
    await publish(scene, report(START))
    for key in (scores_key(START + 1, 0, "1"), evaluation_key(START, 0, "1")):
        await scene.store.put(key, b"{}")
    scene.stage.server.faults.add(rf"^GET .*{scores_key(START, 0, '1')}", Status(403, "AccessDenied"), times=None)
    assert await read() == [START, START + 1, newest]
    assert any(evaluation_key(START, 0, "1") in one for one in asked)
    scene.stage.server.faults.clear()
    assert await read() == [START, newest]  # its scores could not be read; the others are no scores
    assert not any(evaluation_key(START, 0, "1") in one for one in asked)
    assert (await scene.write(maker=maker)).miners[0].pay == (1.0, None, None, None)
    assert await read() == [newest]


async def test_hostile_documents_and_dead_buckets(scene) -> None:
    await scene.recording.begin()
    for _ in range(3):
        await scene.record()
    one, other = scene.miners
    # An invalid report, a report of another window, and a bucket that does not answer.
    await one.comms.own_store.put(debug_key(START, one.comms.uid, "1"), b"[" * 60_000)
    seen = await scene.leader.comms.get_report(0, START)
    mine = seen.model_copy(update={"uid": one.comms.uid})
    body = sign_body(body_of(mine), kind=mine.kind, window=START + 1, signer=one.comms.signer)
    await one.comms.own_store.put(debug_key(START + 1, one.comms.uid, "1"), body)
    scene.stage.server.faults.add(rf"^GET /{other.comms.own_store.name}/debug", Status(503), times=None)
    # Names of windows that do not exist, and scores with no explanation or arbitrary text.
    await scene.store.put(debug_key(10**9, 0, "1"), b"{}")
    await publish(scene, report(START, observations={"2": PeerObservation(hotkey=HOSTILE)}))
    liar = PeerObservation(hotkey=HOSTILE, verdict=HOSTILE * 1000, included=True)
    await publish(
        scene,
        report(
            START + 1,
            observations={"1": liar, "9": liar},
            peer_scores={uid: PeerScore(hotkey=HOSTILE, credit=1e300, final=1e300) for uid in ("1", "9")},
            weights={"1": 1.0},
            faults=(HOSTILE,) * 500,
            struck={"1": (HOSTILE,)},
        ),
    )
    forged = report(START + 2)
    await scene.leader.comms.put_scores_seal(seal_of(report(START + 2, weights={"1": 0.5}), weights_due=9))
    body = sign_document(forged, window=START + 2, signer=scene.leader.comms.signer)
    await scene.store.put(scores_key(START + 2, 0, "1"), body)

    found = await scene.write()
    assert found.windows.count == 3
    assert {node.uid: node.models for node in found.nodes} == {0: "===", 1: "...", 2: "..."}
    assert unpack(found.explanations, 1, 0) == [("report", "the report is inconsistent, no explanation: KeyError")]
    rows = unpack(found.explanations, 1, 1)
    assert rows
    assert len(rows) <= 40
    assert all(len(text) <= 400 for _, text in rows)
    assert "its hash differs from the one published before" in found.windows.sealed[START + 2]
    assert {miner.uid for miner in found.miners} == {1, 2}  # uid 9 is not registered
    page = scene.request.out.read_bytes()
    assert b"alert" not in page
    assert page.count(b"</script>") == 2


async def test_the_loss_shown_is_that_of_all_held_out_pages(scene) -> None:
    """A calibration reads a part of them; earlier reports have only these."""
    await scene.recording.begin()
    for _ in range(2):
        await scene.record()
    loss = LossChange(before=4.5, after=4.25, error=0.01, sequences=16)
    calibrated = {"1": PeerObservation(hotkey="somebody", evaluation=Evaluation(assigned=None, held_out=loss))}
    whole = Alignment(uids=(), products=(), norms=(), gram=(), loss=4.75)
    await publish(scene, report(START, observations=calibrated, alignment=whole))
    await publish(scene, report(START + 1, observations=calibrated))
    found = await scene.write()
    assert found.losses.held_out == (4.75, 4.5)


async def test_scores_of_numbers_that_no_page_can_hold_are_not_known(scene) -> None:
    await scene.recording.begin()
    for _ in range(3):
        await scene.record()
    loss = LossChange(before=1e308, after=1e308, error=0.0, sequences=1)
    huge = PeerObservation(hotkey="somebody", evaluation=Evaluation(assigned=loss, held_out=loss))
    await publish(scene, report(START, observations={"1": huge, "2": huge}))
    endless = DocumentedScore(hotkey="somebody", mu=1e308, sigma=-1e308)
    await publish(scene, report(START + 1, peer_scores={"1": endless}))
    weights = WeightsSet(block=14, intended={}, on_chain={"1" * 5000: 1.0})
    await publish(scene, report(START + 2, weights_set=weights))
    found = await scene.write()
    assert found.windows.count == 3
    assert [miner.outcomes for miner in found.miners] == ["iii", "iii"]
    assert all("numbers that the page can't store" in found.windows.sealed[START + at] for at in range(3))


async def test_scores_with_more_tests_than_a_window_has_are_not_known(scene) -> None:
    """Each test of each update takes time, and a report may hold hundreds."""
    await scene.recording.begin()
    await scene.record()
    uids = range(300)
    tested = PeerObservation(hotkey="somebody", assigned_products=tuple(map(float, uids)))
    gram = tuple(float(one == other) for one in uids for other in uids[one:])
    ones = (1.0,) * len(uids)
    await publish(
        scene,
        report(
            START,
            observations={str(uid): tested for uid in range(40)},
            alignment=Alignment(uids=tuple(uids), products=ones, norms=ones, gram=gram),
            peer_scores={str(uid): PeerScore(hotkey="somebody") for uid in range(40)},
        ),
    )
    found = await scene.write()
    assert "40 own-pages tests, expected at most uids_per_window" in found.windows.sealed[START]


@pytest.mark.parametrize(
    "status", [Status(403, "AccessDenied"), pytest.param(Status(503), marks=pytest.mark.long)], ids=["closed", "silent"]
)
async def test_one_validator_s_closed_bucket_keeps_nothing_of_the_others_back(scene, monkeypatch, status) -> None:
    await scene.recording.begin()
    await scene.record()
    other = scene.miners[0].comms
    monkeypatch.setattr(scene.leader.comms, "validators", lambda: [scene.leader.comms.uid, other.uid])
    monkeypatch.setattr("tplr.page.published.LIST_SECONDS", 0.2)
    scene.stage.server.faults.add(rf"^GET /{other.own_store.name}", status, times=None)
    found = await scene.write()
    assert [(miner.uid, miner.outcomes) for miner in found.miners] == [(1, "i"), (2, "i")]
    assert {node.uid: node.models for node in found.nodes} == {0: "=", 1: ".", 2: "."}
    scene.stage.server.faults.add(rf"^GET /{scene.store.name}", status, times=None)
    with pytest.raises(StoreError):
        await scene.write()


def test_given_inputs_that_do_not_exist_end_with_the_usage(tmp_path, capsys) -> None:
    """They would be missing on the page; one that follows a run reads them when they appear."""
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.touch()
    absent = tmp_path / "absent"
    words = ("--read-events", file, absent, "--audits", absent, "--results", absent)
    with pytest.raises(SystemExit) as refused:
        request_of(from_guide("docs/page.md", "tplr page"), *words)
    assert refused.value.code == 2
    said = capsys.readouterr().err
    names = {"--read-events": "file", "--audits": "file", "--results": "folder"}
    assert all(f"{name} {absent}: no such {kind}" in said for name, kind in names.items())
    following = from_guide("docs/page.md", "tplr page --follow --history run.jsonl")
    request = request_of(following, *words)
    assert (request.events, request.audits, request.results) == ((file, absent), absent, absent)
    for command in (from_guide("docs/page.md", "tplr page"), following):
        with pytest.raises(SystemExit):
            request_of(command, "--audits", folder, "--results", file)
        said = capsys.readouterr().err
        assert f"--audits {folder}: expected a file" in said
        assert f"--results {file}: expected a folder" in said


async def test_scores_are_those_of_a_validator(scene) -> None:
    await scene.recording.begin()
    await scene.record()
    for uid in (1, 77):
        with pytest.raises(ConfigError, match=rf"--validator {uid}: no validator; .* are uids \[0\]"):
            await scene.write(replace(scene.request, validator=uid))
    assert (await scene.write(replace(scene.request, validator=0))).run.validator == 0


async def test_own_events_and_audits_are_shown(scene) -> None:
    await scene.recording.begin()
    await scene.record()
    events = scene.stage.folder("out") / "miner-1.jsonl"
    with JsonlListener(events) as listener:
        Telemetry(role="miner", uid=1, listeners=(listener,)).emit("trained", window=START, loss=7.25)
    stamp = AuditStamp(first=START, last=START, validator=0, agrees=False, text="window 3: digest")
    audits = scene.stage.folder("out") / "audits.jsonl"
    append_stamp(audits, stamp)
    request = PageRequest(
        network=arguments(), out=scene.request.out, json=scene.request.json, events=(events,), audits=audits
    )
    found = await scene.write(request)
    assert found.miners[0].training_loss == (7.25,)
    assert {node.uid: node.name for node in found.nodes} == {0: "", 1: "miner-1", 2: ""}
    assert found.audits == (stamp,)


async def test_evaluations_are_shown(scene, tmp_path) -> None:
    await scene.recording.begin()
    await scene.record()
    held_out = HeldOutLoss(pages="0" * 64, nats_per_token=4.0, bits_per_byte=1.5, tokens=10, bytes=40)
    result = EvaluationResult(
        window=START, version="1", global_step=1, digest="0" * 64, precision="float32", held_out=held_out, tasks={},
        command="tplr eval", tools={},
    )  # fmt: skip
    await scene.leader.comms.put_evaluation(result)
    for window in (START - 1, 10**9):  # not a window of the run, or not yet
        await scene.leader.comms.put_evaluation(result.model_copy(update={"window": window}))
    write_result(result_path(tmp_path, "1", START, "the same"), result.model_copy(update={"uid": None}))
    # A miner's evaluation does not count, and invalid evaluations are left out.
    await scene.miners[0].comms.put_evaluation(result)
    await scene.store.put(evaluation_key(START + 1, 0, "1"), b"{}")
    found = await scene.write(replace(scene.request, results=tmp_path))
    shown = [(one.window, one.metric, one.value, one.uid) for one in found.evaluations]
    both = [("bits per byte", 1.5), ("nats per token", 4.0)]
    assert sorted(shown, key=str) == sorted(
        [(START, metric, value, uid) for metric, value in both for uid in (0, None)], key=str
    )


async def test_a_page_is_published(scene) -> None:
    await scene.recording.begin()
    await scene.record()
    own = ("--out", scene.request.out, "--json", scene.request.json)
    await scene.write(request_of(from_guide("docs/page.md", "tplr page"), *own))
    assert scene.request.out.exists()
    values = {"run.jsonl": scene.request.history}
    command = from_guide("docs/page.md", "tplr page --follow --history run.jsonl --publish", values)
    request = request_of(command, *own)
    with pytest.raises(ConfigError, match="R2_PAGE_BUCKET_NAME is missing"):
        await scene.write(request)
    account = scene.stage.network.aggregator.account
    await scene.write(request, **bucket_variables("page", account, "read", "write"))
    store = scene.leader.comms._connections.store(account.readable)
    assert (await store.get(page_key("1"), max_bytes=10**7)) == scene.request.out.read_bytes()
    assert json.loads(await store.get(page_document_key("1"), max_bytes=10**7))["format"] == 2


async def test_a_page_follows_its_run(staged, caplog) -> None:
    """It is rewritten after each window, also after an outage of the storage; no reader sees half of a page."""
    async with staged(miners=1, blocks_per_window=2, manifest_timeout_seconds=0.1) as stage:
        leader, miner = [await stage.context(stage.setup(name)) for name in ("validator", "miner-1")]
        async with stage.running(leader.clock.run()):
            await leader.comms.refresh()
            await leader.clock.wait_for_window(0)
            start = leader.clock.window
            folder = stage.folder("recording")
            recording = Recording(leader.comms, [miner.comms], stage.hparams, start=start, folder=folder)
            await recording.begin()
            (stage.network.folder / "hparams.json").write_text(stage.hparams.model_dump_json(exclude={"sparseloco"}))
            setup = stage.setup("miner-1")
            words = [str(one) for one in node_command(stage.network, setup)]
            out = stage.folder("out") / "page.html"
            history = out.with_name("run.jsonl")
            command = from_guide("docs/page.md", "tplr page --follow --history run.jsonl", {"run.jsonl": history})
            network = words[words.index("--netuid") :]
            events = out.with_name("events.jsonl")
            later = [out.with_name(name) for name in ("audits", "results", "more")]
            out.parent.mkdir()
            events.touch()
            inputs = ("--audits", later[0], "--results", later[1], "--read-events", events, later[2])
            request = request_of(command, "--out", out, "--json", out.with_suffix(".json"), *inputs, *network)

            @contextlib.asynccontextmanager
            async def surroundings() -> AsyncIterator[Environment]:
                variables = node_environment(stage.network, setup, stage.server.endpoint)
                yield Environment({name: one for name, one in variables.items() if "AGGREGATOR" not in name})

            async def shows(windows: int) -> None:
                while not (out.exists() and count(out) >= windows):  # noqa: ASYNC110 - a file has no event
                    await asyncio.sleep(0.05)

            def count(path) -> int:
                return RunDocument.model_validate_json(path.with_suffix(".json").read_bytes()).windows.count

            following = asyncio.create_task(make_page(request, surroundings))
            async with asyncio.timeout(60):
                await leader.clock.wait_for_window(start + 1)
                await recording.record()
                await shows(1)
                outage = stage.server.faults.add(
                    rf"^GET /{leader.comms.own_store.name}", Status(403, "AccessDenied"), times=2
                )
                await leader.clock.wait_for_window(start + 2)
                await recording.record()
                await shows(2)
            assert outage.left == 0
            assert "page not updated" in caplog.text
            for name, path in zip(("--audits", "--results", "--read-events"), later, strict=True):
                assert caplog.text.count(f"{name} {path} does not exist: the page lacks it until it is created") == 1
            assert f"{events} does not exist" not in caplog.text
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
            names = sorted(path.name for path in out.parent.iterdir())
            assert names == ["events.jsonl", "page.html", "page.json", "run.jsonl"]

"""A miner and a validator in one process, on a real chain file, server and pages, with failures."""

import itertools

import pytest
import torch

from tplr.chain.ledger import Ledger
from tplr.cli.reported import FAILED
from tplr.errors import NotRegistered
from tplr.hparams import HParams
from tplr.keys import gradient_key, included_key, state_key
from tplr.localnet.dataset import SUBFOLDER
from tplr.node.inspect_cli import AGREES, DIFFERS
from tplr.node.main import _first
from tplr.node.miner import Miner
from tplr.node.replica import Replica
from tplr.node.validator import Validator
from tplr.node.window_time import PHASES
from tplr.storage.retry import with_retry
from tplr.testing.s3server import Status
from tplr.training.model import build_model

VALIDATOR, MINER = 0, 1


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_a_life_of_two_nodes(stage, command, capsys: pytest.CaptureFixture[str]) -> None:
    validator, miner = stage.setup("validator"), stage.setup("miner-1")
    mine = await stage.node(miner)
    watch = await stage.node(validator)
    background = [one for _, _, context in (mine, watch) for one in (context.clock.run(), context.comms.run_refresh())]
    async with stage.running(
        *background, Miner(*mine, stage.hparams).run(), Validator(*watch, stage.hparams).run()
    ) as tasks:
        # They find each other and agree, and the miner is paid.
        await stage.until(lambda: len(stage.of("applied", "validator")) >= 2 and stage.of("weights", "validator"))
        held = {event["window"]: event["digest"] for event in stage.of("applied", "miner")}
        for event in stage.of("applied", "validator"):
            assert event["digest"] == held[event["window"]]
            assert event["included"] == [MINER]
        assert stage.of("weights", "validator")[-1]["weights"] == {str(MINER): 1.0}
        # Phases sum to the time between two reports of phases.
        for node, phase in (("miner", "training"), ("validator", "evaluating")):
            reports = stage.of("window_time", node)
            for before, report in itertools.pairwise(reports):
                assert sum(report[name] for name in PHASES) == pytest.approx(report["seconds"])
                assert report["seconds"] == pytest.approx(report["time"] - before["time"], abs=0.5)
            for name in (phase, "waiting_for_bound", "gathering", "applying", "waiting_for_end"):
                assert any(report[name] > 0 for report in reports), name
        assert stage.of("window_time", "miner")[-1]["memory"]["weights"] > 0

        # No aggregator's bucket is configured: the leader publishes the included sets.
        published = {event["window"]: event["included"] for event in stage.of("aggregated", "validator")}
        assert published
        leader = mine[2].comms.highest_stake_validator()
        assert leader is not None
        store = mine[2].comms.store_of(leader)
        assert store is not None
        names = {info.key for info in await store.list("aggregator-")}
        assert {included_key(window, stage.hparams.version) for window in published} <= names

        # Any node can recompute it, every loss and score, and finds a changed byte.
        await stage.until(lambda: len(stage.of("scores", "validator")) >= 2)
        last = stage.of("scores", "validator")[-2]["window"]
        first = watch[0].train_state.start_window
        await stage.until(lambda: stage.of("checkpoint", "validator")[-1:] and last + 1 in stage.held("validator"))
        assert await command("audit", "--window", last + 1, "--from", "checkpoint") == AGREES
        own = ("--wallet.name", "validator")  # also with the wallet of the audited validator
        assert await command("audit", "--window", last + 1, "--from", "checkpoint", *own) == AGREES
        assert f"windows {last + 1} to {last + 1}: " in capsys.readouterr().out
        assert await command("audit", "--window", first, "--from", "checkpoint") == FAILED
        assert await command("audit", "--window", last, "--all") == AGREES
        assert f"AGREES: validator {VALIDATOR}, windows {first} to {last}: " in capsys.readouterr().out
        assert await command("explain", "--window", last, "--uid", MINER) == AGREES
        assert "valid; on the peer list, sampled for evaluation" in capsys.readouterr().out
        for owner, key, what in [
            (watch, included_key(last, stage.hparams.version), "the included set"),
            (watch, state_key("aggregator", last, 0, stage.hparams.version), "the aggregate"),
            # An update that a miner removes is in the aggregate, and not the validator's fault.
            (mine, gradient_key(last, MINER, stage.hparams.version), ""),
        ]:
            bucket = owner[2].comms.own_store
            body = await bucket.get(key, max_bytes=2**20)
            await bucket.put(key, body[:-1] + bytes([body[-1] ^ 1]))
            assert await command("audit", "--window", last, "--all") == (DIFFERS if what else AGREES)
            told = (
                f"DIFFERS: window {last}: {what}" if what else f"BELIEVED: window {last}: uid {MINER}: its bucket now"
            )
            assert told in capsys.readouterr().out
            await with_retry(lambda bucket=bucket, key=key, body=body: bucket.put(key, body), deadline_seconds=10)

        # The validator can't read its pages: it reports that, continues with the model, and the window changes no score
        # of a miner that was in time.
        fault = stage.server.faults.add(rf"GET /dataset/{SUBFOLDER}/.*parquet", Status(404, "NoSuchKey"), times=None)
        applied = len(stage.of("applied", "validator"))

        def changes() -> list[tuple[dict[str, float], dict[str, float]]]:
            """Scores before and after each window without measures in which the miner was in time."""
            in_time = {event["window"] for event in stage.of("applied", "validator") if event["included"] == [MINER]}
            found, before, blind = [], {}, False
            for event in stage.events:
                blind = blind or (event["event"] == "problem" and "no update measured" in event["text"])
                if event["event"] == "scores":
                    if blind and event["window"] in in_time:
                        found.append((before, event["scores"]))
                    before, blind = event["scores"], False
            return found

        await stage.until(changes)
        await stage.until(lambda: len(stage.of("applied", "validator")) > applied)
        before, after = changes()[0]
        assert before == after
        # The miner has no pages either: its windows are lost, and it logs which ones.
        await stage.until(lambda: stage.of("missed", "miner"))
        fault.left = 0
        stage.server.faults.clear()
        lost = {event["window"] for event in stage.of("missed", "miner")}
        await stage.until(lambda: stage.of("uploaded", "miner")[-1]["window"] > max(lost))
        assert not lost & {event["window"] for event in stage.of("uploaded", "miner")}

        # Its uid is given to another neuron: it ends, and prints the remedy.
        admin = Ledger(stage.network.chain)
        admin.register("other", "cold-other")
        admin.deregister(miner.address)
        admin.close()
        await stage.until(tasks[-2].done)
    with pytest.raises((NotRegistered, ExceptionGroup)) as caught:
        tasks[-2].result()
    expelled = _first(caught.value, NotRegistered)
    assert expelled is not None
    assert "register it" in str(expelled)
    assert not tasks[-1].done() or tasks[-1].cancelled()  # the validator continued


async def test_state_of_another_run_or_model_is_passed_over(stage, caplog: pytest.LogCaptureFixture) -> None:
    setup = stage.network.nodes[1]
    replica, _, context = await stage.node(setup)
    await replica.open(start_window=5)
    with torch.no_grad():
        for parameter in replica.train_state.parameters.values():
            parameter.add_(1.0)
    replica.train_state.save(9, replica.train_state.stateful_values())

    def again(hparams: HParams) -> Replica:
        return Replica(build_model(hparams), hparams, context, stage.network.folder / setup.name)

    same = again(stage.hparams)
    await same.open(start_window=5)
    assert same.window == 9
    kept = same.train_state.parameters
    assert all(torch.equal(kept[name], value) for name, value in replica.train_state.parameters.items())

    fresh = build_model(stage.hparams)
    wider = stage.hparams.model.model_copy(update={"intermediate_size": 96})
    for hparams, start in (
        (stage.hparams, 6),
        (stage.hparams.model_copy(update={"model": wider}), 5),
        (stage.hparams.model_copy(update={"init_seed": 1}), 5),
    ):
        caplog.clear()
        other = again(hparams)
        await other.open(start_window=start)
        assert (other.window, other.train_state.global_step) == (start, 0)
        assert "saved state not used" in caplog.text
        if hparams is stage.hparams:
            held = other.train_state.parameters
            assert all(torch.equal(held[name], value) for name, value in fresh.named_parameters())

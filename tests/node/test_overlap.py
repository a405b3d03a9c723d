"""Miners that train a window while the previous one is gathered and applied (``outer_delay`` 1)."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from overlap import CONSTANTS, BusyMiner, began_before_it_held, by_hand, many_steps

from tplr.exchange.gather import GatherResult
from tplr.hparams import HParams
from tplr.localnet.plan import scheme_constants
from tplr.node import failpoints
from tplr.node.data_loader import WindowBatches
from tplr.node.miner import Miner
from tplr.node.replica import Replica
from tplr.node.state import SnapshotDraft
from tplr.node.validator import Validator
from tplr.schemas import UploadBounds
from tplr.training.model import build_model


@pytest.fixture
def quick(monkeypatch):
    """Updates are uploaded as soon as the window is over."""
    monkeypatch.setattr(UploadBounds, "resolution", 0.0)


async def tasks_of(stage, name: str, role: type[Miner] | type[Validator]):
    replica, data_loader, context = await stage.node(stage.setup(name))
    return context.clock.run(), context.comms.run_refresh(), role(replica, data_loader, context, stage.hparams).run()


async def test_a_set_interrupts_each_training_and_the_models_stay_equal(staged, quick):
    async with by_hand(staged) as hand:
        start = hand.start
        for window in range(start, start + 3):
            await hand.end(window)
            await hand.decide(window)
            await hand.applied(window)
        await hand.until(lambda: start + 4 in hand.miner.holding)
        assert hand.miner.lacking == hand.miner.expecting == {*range(start + 1, start + 5)}
        mine, others = await hand.models()
        assert mine == others
        assert hand.stage.held("miner-1") == hand.stage.held("validator")
        assert len({*hand.stage.held("miner-1").values()}) == 3
        assert [event["included"] for event in hand.stage.of("applied", "miner-1")] == [[1, 2]] * 3
        assert not hand.stage.of("missed", "miner-1")


def told(stage, *kinds: str) -> list[tuple[str, int]]:
    """Kind and window of the miner's events of these kinds."""
    mine = [event for event in stage.events if event["node"] == "miner-1" and event["event"] in kinds]
    return [(event["event"], event["window"]) for event in mine]


@pytest.mark.long
async def test_a_window_is_voided_in_the_midst_of_a_training(staged, quick):
    """Set w + 1 voids w, which the miner has applied; no saved state is as old: it begins with the first weights."""
    async with by_hand(staged) as hand:
        stage, miner, voided, trained = hand.stage, hand.miner, hand.start + 1, hand.start + 3

        def applied_again() -> bool:
            return told(stage, "applied").count(("applied", trained - 1)) == 2

        miner.enough = lambda window: miner.complete(window) and (window < trained or applied_again())
        for window in (hand.start, voided):
            await hand.end(window)
            await hand.decide(window)
            await hand.applied(window)
        await hand.end(trained - 1)
        assert trained in miner.lacking
        await hand.decide(trained - 1, voided=(voided,))
        await hand.until(applied_again)
        await hand.end(trained)
        await hand.decide(trained)
        await hand.applied(trained)
        mine, others = await hand.models()
        assert mine == others
        found = told(stage, "applied", "rolled_back", "trained")
        found = found[found.index(("rolled_back", voided)) - 1 :]
        assert found[:6] == [
            ("applied", trained - 1),
            ("rolled_back", voided),
            ("applied", hand.start),
            ("applied", voided),
            ("applied", trained - 1),
            ("trained", trained),
        ]
        included = {event["window"]: event["included"] for event in stage.of("applied", "miner-1")}
        assert included == {hand.start: [1, 2], voided: [], trained - 1: [1, 2], trained: [1, 2]}
        assert not stage.of("missed", "miner-1")


@pytest.mark.long
async def test_a_model_that_differs_is_rolled_back_to_a_saved_state_in_the_midst_of_a_training(staged, quick):
    async with by_hand(staged) as hand:
        stage, damaged = hand.stage, hand.start + 1
        await hand.other.open(hand.start)
        await hand.end(hand.start)
        await hand.decide(hand.start)
        await hand.applied(hand.start)
        await hand.end(damaged)
        async with hand.replica.model:
            hand.replica.train_state.parameters["lm_head.weight"].data.add_(1.0)
        await hand.decide(damaged)
        await hand.applied(damaged)
        await hand.other.advance(until=damaged + 1)  # the validator publishes its report
        assert stage.held("miner-1")[damaged] != stage.held("validator")[damaged]
        await hand.end(damaged + 1)
        await hand.decide(damaged + 1)
        await hand.applied(damaged + 1)
        mine, others = await hand.models()
        assert mine == others
        assert stage.held("miner-1") == stage.held("validator")
        assert told(stage, "applied", "rolled_back")[2:] == [
            ("rolled_back", damaged),
            ("applied", damaged),
            ("applied", damaged + 1),
        ]
        await hand.until(lambda: ("trained", damaged + 2) in told(stage, "trained"))
        found = told(stage, "rolled_back", "trained")
        assert found.index(("trained", damaged + 1)) < found.index(("rolled_back", damaged))
        assert damaged + 2 in hand.miner.lacking  # its training had begun
        assert found.index(("rolled_back", damaged)) < found.index(("trained", damaged + 2))
        assert not stage.of("missed", "miner-1")


@pytest.mark.long
async def test_who_is_behind_misses_the_windows_that_passed_and_goes_on_with_the_present_one(staged, quick):
    async with by_hand(staged) as hand:
        stage, miner, late = hand.stage, hand.miner, hand.start + 1
        await hand.end(hand.start)
        assert late in miner.lacking
        await hand.pass_into(late + 2)
        await hand.decide(hand.start)
        for window in (late, late + 1):
            await hand.decide(window)
        await hand.end(late + 2)
        await hand.decide(late + 2)
        await hand.applied(late + 2)
        missed = {event["window"]: event["cause"] for event in stage.of("missed", "miner-1")}
        assert missed == {late: "late", late + 1: "behind"}
        assert late + 2 not in miner.lacking  # it began with all windows before it
        assert late + 3 in miner.lacking
        included = [(event["window"], event["included"]) for event in stage.of("applied", "miner-1")]
        assert included == [(hand.start, [1, 2]), (late, []), (late + 1, []), (late + 2, [1, 2])]
        mine, others = await hand.models()
        assert mine == others


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_nodes_hold_equal_models_and_a_newcomer_catches_up(staged):
    async with staged(3, "sparseloco", **CONSTANTS) as stage:
        stage.hparams = many_steps(stage.hparams)
        first = [await tasks_of(stage, name, BusyMiner) for name in ("miner-1", "miner-2")]
        first.append(await tasks_of(stage, "validator", Validator))
        async with stage.running(*(one for tasks in first for one in tasks)) as tasks:

            def reached(node: str, windows: int) -> bool:
                assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
                return len(stage.of("applied", node)) >= windows

            await stage.until(lambda: reached("validator", 3), seconds=150)
            async with stage.running(*await tasks_of(stage, "miner-3", BusyMiner)):
                await stage.until(
                    lambda: reached("validator", 7) and len(stage.of("uploaded", "miner-3")) >= 2, seconds=150
                )
                newest = stage.of("applied", "validator")[-1]["window"]
                nodes = ("validator", "miner-1", "miner-2", "miner-3")
                await stage.until(lambda: all(newest in stage.held(node) for node in nodes), seconds=60)
        expected = stage.held("validator")
        assert len(set(expected.values())) == len(expected)  # each window moved the model
        for node in nodes[1:]:
            held = stage.held(node)
            assert {window: held[window] for window in held if window in expected} == {
                window: expected[window] for window in held if window in expected
            }
        for node in ("miner-1", "miner-2"):
            assert len(began_before_it_held(stage, node)) >= 3
        included = {uid for event in stage.of("applied", "validator") for uid in event["included"]}
        assert {1, 2, 3} <= included
        assert stage.of("weights", "validator")[-1]["weights"]
        assert not any(event["struck"] for event in stage.of("scores", "validator"))
        # Each window is trained or missed, and missed only because the miner was behind.
        trained = [event["window"] for event in stage.of("trained", "miner-2")]
        missed = [event["window"] for event in stage.of("missed", "miner-2")]
        assert sorted(trained + missed) == [*range(min(trained + missed), max(trained + missed) + 1)]
        assert all(event["cause"] == "behind" for event in stage.of("missed", "miner-2"))


async def test_an_update_is_packed_only_when_the_save_that_began_before_it_is_written(monkeypatch, tmp_path):
    """The previous window is applied, and its state is saved, at the moment when training has ended."""
    raw = scheme_constants("sparseloco") | {"outer_delay": 1}
    raw["model"] |= {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    hparams, written, applied = HParams.model_validate(raw), threading.Event(), asyncio.Event()
    write = SnapshotDraft.write

    def write_late(draft: SnapshotDraft) -> None:
        assert written.wait(60)
        write(draft)

    async def answer(*_: object, **__: object) -> str:
        return "0" * 64

    monkeypatch.setattr(SnapshotDraft, "write", write_late)
    pages = WindowBatches("0" * 64, np.random.default_rng(0).integers(0, 64, (2, 2, 12)))

    async def assigned(uid: int, window: int) -> WindowBatches:
        return pages

    metagraph = SimpleNamespace(uid_of=lambda hotkey: None)
    comms = SimpleNamespace(uid=3, hotkey="", metagraph=metagraph, window_hash=answer, put_report=answer)
    clock = SimpleNamespace(window=5, seconds_left=lambda: 100.0, wait_for_window=answer)
    context = SimpleNamespace(comms=comms, clock=clock, telemetry=SimpleNamespace(emit=lambda *_, **__: None))
    replica = Replica(build_model(hparams), hparams, context, tmp_path)
    miner = Miner(replica, SimpleNamespace(assigned=assigned, read_ahead=lambda *_: None), context, hparams)
    replica.window, replica.train_state.start_window = 5, 0
    applying: list[asyncio.Task[None]] = []

    def error_feedback() -> dict[str, torch.Tensor]:
        tensors = replica.train_state.outer.state_dict()["tensors"]
        return {name: one for name, one in tensors.items() if not name.startswith("shared.")}

    async def hold(name: failpoints.FailpointName) -> None:
        if name == "trained" and replica.window == 5 and before:
            applying.append(asyncio.create_task(replica.apply(GatherResult(window=5, updates=(), skipped={}))))
            await applied.wait()  # it holds the model
        elif name == "applied":
            applied.set()
            await asyncio.sleep(0.05)  # until the miner waits for the model

    before: dict[str, torch.Tensor] = {}
    token = failpoints.hook.set(hold)
    try:
        assert await miner._make_update(5)
        before = error_feedback()
        asyncio.get_running_loop().call_later(0.5, written.set)
        assert await miner._make_update(6)
        await asyncio.gather(*applying)
        await replica.wait_for_save()
    finally:
        failpoints.hook.reset(token)
    saved = await asyncio.to_thread(replica.train_state.saved)
    assert saved is not None
    assert all(torch.equal(one, before[name]) for name, one in saved.tensors("own").items())
    assert any(not torch.equal(one, before[name]) for name, one in error_feedback().items())

"""Miners that train a window while the one before is gathered and applied (``outer_delay`` 1)."""

import time

import pytest

from tplr.node.miner import Miner
from tplr.node.validator import Validator

# Windows of 8 s: four nodes in one process keep up.
CONSTANTS = {
    "outer_delay": 1,
    "blocks_per_window": 16,
    "time_window_delta_seconds": 3,
    "commit_margin_seconds": 1.5,
    "minimum_peers": 2,
    "pages_per_window": 4,
    "manifest_timeout_seconds": 1.0,
    "checkpoint_frequency": 2,
}
INNER_STEPS = 1000
BATCH_SECONDS = 0.25


class BusyMiner(Miner):
    """Its device needs so long for a batch that training never ends before its time, and there is one to interrupt."""

    def _out_of_time(self) -> bool:
        time.sleep(BATCH_SECONDS)  # in the training's thread
        return super()._out_of_time()


async def tasks_of(stage, name: str, role: type[Miner] | type[Validator]):
    replica, data_loader, context = await stage.node(stage.setup(name))
    return context.clock.run(), context.comms.run_refresh(), role(replica, data_loader, context, stage.hparams).run()


def began_before_it_held(stage, node: str) -> list[int]:
    """Windows whose training ``node`` began before, and ended after, it had applied the window before."""
    applied = {event["window"]: event["time"] for event in stage.of("applied", node)}
    trained = {event["window"]: event for event in stage.of("trained", node)}
    return [
        window
        for window, event in trained.items()
        if window - 1 in applied and event["time"] - event["seconds"] < applied[window - 1] < event["time"]
    ]


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_nodes_hold_equal_models_and_a_newcomer_catches_up(staged):
    async with staged(3, "sparseloco", **CONSTANTS) as stage:
        constants = stage.hparams.sparseloco.model_copy(update={"inner_steps": INNER_STEPS})
        stage.hparams = stage.hparams.model_copy(update={"sparseloco": constants})
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
        # A miner loses no window but those before it had caught up.
        assert [event["cause"] for event in stage.of("missed", "miner-2")] in ([], ["behind"])

"""Ended at every named step and started again, each role comes back to the bytes of a node that never stopped."""

import asyncio

import pytest

from tplr.node.aggregator import Aggregator
from tplr.node.miner import Miner
from tplr.node.steps import STEPS, Step, watcher
from tplr.node.validator import Validator

MINER: tuple[Step, ...] = STEPS[: STEPS.index("published") + 1]
VALIDATOR: tuple[Step, ...] = (
    "gathered",
    "looked",
    "scored",
    "applied",
    "reported",
    "saved",
    "publishing",
    "published",
)
AGGREGATOR: tuple[Step, ...] = ("found", "kept", "included", "aggregated")
THREADS_SECONDS = 0.3  # until what a dead node's threads had begun is done: a process takes them with it


class Mortal:
    """A node that ends at each of ``steps`` in turn, without a word, and is started again from what is on disk."""

    def __init__(self, stage, name: str, steps: tuple[Step, ...]) -> None:
        self.stage = stage
        self.setup = stage.setup(name)
        self.left = [*steps]

    async def live(self) -> None:
        while True:
            died = asyncio.Event()

            async def watch(step: Step, died: asyncio.Event = died) -> None:
                if died.is_set() or (self.left and step == self.left[0]):
                    died.set()
                    await asyncio.Event().wait()

            watcher.set(watch)
            tasks = [asyncio.create_task(one) for one in await self.born()]
            await asyncio.wait([*tasks, end := asyncio.create_task(died.wait())], return_when="FIRST_COMPLETED")
            for task in (*tasks, end):
                task.cancel()
            if not died.is_set():
                await asyncio.gather(*tasks)
            await asyncio.gather(*tasks, return_exceptions=True)
            self.left.pop(0)
            await asyncio.sleep(THREADS_SECONDS)

    async def born(self):
        hparams, setup = self.stage.hparams, self.setup
        if setup.role == "aggregator":
            borders = await self.stage.borders(setup)
            spec, folder = self.stage.spec, self.stage.folder(setup.name)
            role = Aggregator(borders, hparams, spec, folder)
        else:
            replica, feed, borders = await self.stage.node(setup, closed=False)
            self.stage.spec = replica.outer.spec
            role = (Miner if setup.role == "miner" else Validator)(replica, feed, borders, hparams)
        await borders.comms.refresh()
        return borders.clock.run(), borders.comms.run_refresh(), role.run()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("scheme", ["demo", "sparseloco"])
async def test_ended_anywhere_it_ends_with_the_bytes_of_who_never_stopped(staged, scheme: str) -> None:
    constants = {"manifest_timeout_seconds": 1.0, "checkpoint_frequency": 2, "own_aggregator": True}
    async with staged(2, scheme, **constants) as stage:
        steady = Mortal(stage, "miner-2", ())
        mortals = [
            Mortal(stage, "miner-1", MINER),
            Mortal(stage, "validator", VALIDATOR),
            Mortal(stage, "aggregator", AGGREGATOR),
        ]
        stage.spec = stage.make_spec()
        async with stage.running(*(one.live() for one in (steady, *mortals))) as tasks:

            def all_died() -> bool:
                assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
                return not any(one.left for one in mortals)

            await stage.until(all_died, seconds=120)
            window = max(event["window"] for event in stage.of("applied", "miner-2"))

            def recovered() -> bool:
                return all(stage.held(name).keys() & range(window, window + 4) for name in ("miner-1", "validator"))

            await stage.until(recovered, seconds=60)
        never_stopped = stage.held("miner-2")
        for name in ("miner-1", "validator"):
            shared = never_stopped.keys() & stage.held(name).keys()
            assert max(shared) >= window
            assert {one: stage.held(name)[one] for one in shared} == {one: never_stopped[one] for one in shared}

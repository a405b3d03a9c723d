"""Each role is killed at every named step and restarted; it recovers the bytes of a node that never stopped."""

import asyncio
import contextlib

import pytest
from overlap import CONSTANTS, BusyMiner, began_before_it_held, many_steps

from tplr.errors import ConfigError
from tplr.keys import parse_window_key
from tplr.node.aggregator import Aggregator
from tplr.node.failpoints import FAILPOINTS, FailpointName, KillAt, hook
from tplr.node.miner import Miner
from tplr.node.replica import Replica
from tplr.node.validator import Validator
from tplr.storage.many import list_objects

MINER: tuple[FailpointName, ...] = FAILPOINTS[: FAILPOINTS.index("publishing")]
VALIDATOR: tuple[FailpointName, ...] = (
    "gathered",
    "observed",
    "sealed",
    "scored",
    "applied",
    "reported",
    "saved",
    "publishing",
    "published",
)
ELECTOR: tuple[FailpointName, ...] = ("found", "kept", "included")
AGGREGATOR: tuple[FailpointName, ...] = ("found", "aggregated")
# Where a miner that overlaps is ended: in its training while a set arrives, is applied and saved; and at the other
# steps once a set has interrupted a training in this life.
PAUSED: tuple[FailpointName, ...] = ("applied",)
EXPECTING: tuple[FailpointName, ...] = ("gathered",)
TRAINING: tuple[FailpointName, ...] = ("reported", "saved")
RECOVERY_WINDOWS = 3
THREADS_SECONDS = 0.3  # until a dead node's threads have finished their work; a real process would end them


@pytest.mark.parametrize("text", ["packed:x", "packed:0", "paked:3", ":3"])
def test_a_kill_at_no_failpoint_is_refused(text) -> None:
    with pytest.raises(ConfigError, match=f"TPLR_LOCALNET_KILL_AT is '{text}': expected one of data_loaded, trained"):
        KillAt(text)
    assert (KillAt("packed").left, KillAt("packed:3").left) == (1, 3)


class Mortal:
    """A node that ends abruptly at each of ``steps``, one after the other, and is restarted from its disk.

    Attributes:
        died: number of all nodes' events when it ended for the last time.
        role: of this life.
    """

    role: Miner | Validator | Aggregator

    def __init__(self, stage, name: str, steps: tuple[FailpointName, ...]) -> None:
        self.stage = stage
        self.setup = stage.setup(name)
        self.left = [*steps]
        self.died = 0
        self.replica: Replica | None = None

    async def live(self) -> None:
        while True:
            died = asyncio.Event()

            async def watch(step: FailpointName, died: asyncio.Event = died) -> None:
                if died.is_set() or (self.left and step == self.left[0] and self._overlaps(step)):
                    died.set()
                    await asyncio.Event().wait()

            hook.set(watch)
            tasks = [asyncio.create_task(one) for one in await self.born()]
            await asyncio.wait([*tasks, end := asyncio.create_task(died.wait())], return_when="FIRST_COMPLETED")
            for task in (*tasks, end):
                task.cancel()
            if not died.is_set():
                await asyncio.gather(*tasks)
            await asyncio.gather(*tasks, return_exceptions=True)
            self.left.pop(0)
            self.died = len(self.stage.events)
            await self._end_save()
            await asyncio.sleep(THREADS_SECONDS)

    def _overlaps(self, step: FailpointName) -> bool:
        """Whether it would end amid an overlap; True for those that do not overlap."""
        miner = self.role
        if not isinstance(miner, BusyMiner):
            return True
        if step in PAUSED:
            return miner.paused
        if step in EXPECTING:
            return miner.expects
        return miner.training if step in TRAINING else bool(miner.interrupted)

    async def _end_save(self) -> None:
        """A save that was being written ends with the node: nothing of it is written into the next life."""
        if self.replica is None or self.replica._saving is None:
            return
        self.replica._saving.cancel()
        await asyncio.wait([self.replica._saving])
        await asyncio.to_thread(self.replica.train_state.wait_written)

    async def born(self):
        hparams, setup = self.stage.hparams, self.setup
        if setup.role == "aggregator":
            context = await self.stage.context(setup)
            spec, folder = self.stage.spec, self.stage.folder(setup.name)
            self.role = Aggregator(context, hparams, spec, folder)
        else:
            self.replica, data_loader, context = await self.stage.node(setup, closed=False)
            self.stage.spec = self.replica.train_state.outer.spec
            miner = BusyMiner if hparams.outer_delay else Miner
            self.role = (miner if setup.role == "miner" else Validator)(self.replica, data_loader, context, hparams)
        await context.comms.refresh()
        return context.clock.run(), context.comms.run_refresh(), self.role.run()

    def windows_to_recover(self, steady: str) -> int | None:
        """Return the windows that ``steady`` applied from the last kill until this node held the newest, or None if not
        yet."""
        newest, passed = -1, 0
        for number, event in enumerate(self.stage.events):
            after = number >= self.died
            if event["event"] == "applied" and event["node"] == steady:
                newest, passed = event["window"], passed + after
            elif (
                event["event"] == "applied" and event["node"] == self.setup.name and after and event["window"] >= newest
            ):
                return passed
        return None


def trained_on_what_it_held(events: list[dict]) -> bool:
    """Return whether each published update of a node was of the window after its last applied one."""
    held = None
    for event in events:
        if event["event"] == "applied":
            held = event["window"]
        elif event["event"] == "restored":
            held = event["window"] - 1
        elif event["event"] == "uploaded" and held not in (None, event["window"] - 1):
            return False
    return True


async def readable_scores(stage, setup) -> list[int]:
    """Return windows with published scores; each report is the sealed one, at any point of its author's kill."""
    comms, found = (await stage.context(setup)).comms, []
    for info in await list_objects(comms.own_store, "scores-"):
        key = parse_window_key(info.key, stage.hparams.version)
        if key and key.kind == "scores":
            assert (await comms.get_scores(comms.uid, key.window)).seal
            found.append(key.window)
    return found


@pytest.mark.localnet  # windows pass by the clock: beside five other tests a restart takes more of them
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scheme", "own_aggregator", "outer_delay"),
    [
        ("demo", True, 0),
        pytest.param("sparseloco", False, 0, marks=pytest.mark.long),
        pytest.param("muon", False, 0, marks=pytest.mark.long),
        pytest.param("muon", False, 1, marks=pytest.mark.long),
    ],
)
async def test_ended_at_every_failpoint_a_node_recovers_the_bytes_of_one_that_never_stopped(
    staged, scheme: str, own_aggregator: bool, outer_delay: int
) -> None:
    constants = {"manifest_timeout_seconds": 1.0, "checkpoint_frequency": 2, "own_aggregator": own_aggregator}
    constants |= CONSTANTS if outer_delay else {}
    # Errors of a dead node's tasks are ignored.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with staged(2, scheme, **constants) as stage:
        if outer_delay:
            stage.hparams = many_steps(stage.hparams)
        steady = Mortal(stage, "miner-2", ())
        # Electors aggregate if there is no aggregator.
        aggregators = [Mortal(stage, "aggregator", AGGREGATOR)] if own_aggregator else []
        validator = Mortal(stage, "validator", VALIDATOR + ELECTOR + AGGREGATOR[1 + own_aggregator :])
        holders = [Mortal(stage, "miner-1", MINER), validator]
        nodes = [*holders, *aggregators]
        stage.spec = stage.make_spec()
        async with stage.running(*(one.live() for one in (steady, *nodes))) as tasks:

            def all_died() -> bool:
                assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
                return not any(one.left for one in nodes)

            with contextlib.suppress(TimeoutError):
                await stage.until(all_died, seconds=300)
            # A miner that should overlap, and never does, is not ended.
            assert all_died(), {one.setup.name: one.left for one in nodes}
            await stage.until(lambda: all(one.windows_to_recover("miner-2") is not None for one in holders), seconds=60)
            async with asyncio.timeout(60):  # the chain limits how often weights are set, and scores follow them
                while not await readable_scores(stage, validator.setup):  # noqa: ASYNC110 - another process publishes
                    await asyncio.sleep(1)
        assert trained_on_what_it_held([event for event in stage.events if event["node"] == "miner-1"])
        if outer_delay:  # at least where it ended because a training had been interrupted
            assert len(began_before_it_held(stage, "miner-1")) >= len({*MINER} - {*PAUSED, *EXPECTING, *TRAINING})
        never_stopped = stage.held("miner-2")
        for one in holders:
            assert (one.windows_to_recover("miner-2") or 0) <= RECOVERY_WINDOWS
            held = stage.held(one.setup.name)
            shared = never_stopped.keys() & held.keys()
            assert max(shared) >= max(never_stopped) - RECOVERY_WINDOWS
            assert {window: held[window] for window in shared} == {window: never_stopped[window] for window in shared}

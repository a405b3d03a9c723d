"""Fault injection for ``tplr localnet --chaos``: generates a script from a seed, and executes it."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from tplr.config import KILL_AT, process_variables
from tplr.errors import StoreError
from tplr.keys import checkpoint_prefix, commit_key, debug_key, gradient_key
from tplr.localnet.supervisor import Localnet
from tplr.logging import logger
from tplr.node.failpoints import FAILPOINTS, FailpointName
from tplr.storage import S3Connections

Kind = Literal["kill", "pause", "storage", "chain", "garbage", "skew"]

FIRST_WINDOW = 2  # of the run; no fault before it
QUIET_WINDOWS = 12  # without faults at the end, after all nodes have caught up: about eight until updates are applied
RANDOM_KILLS = 3  # at random times, not at a failpoint
SKEW_SECONDS = 150.0  # start-up checks refuse 300
GARBAGE_OBJECTS = 120
RESTART_SECONDS = 1.0
POLL_SECONDS = 0.2

AGGREGATOR_FAILPOINTS: tuple[FailpointName, ...] = ("found", "aggregated")
VALIDATOR_FAILPOINTS: tuple[FailpointName, ...] = (
    "found",
    "kept",
    "included",
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
MINER_FAILPOINTS = FAILPOINTS[: FAILPOINTS.index("publishing")]
FAILPOINTS_OF = {"miner": MINER_FAILPOINTS, "validator": VALIDATOR_FAILPOINTS, "aggregator": AGGREGATOR_FAILPOINTS}
RARE_FAILPOINTS: tuple[FailpointName, ...] = ("publishing", "published")  # reached only once in several windows

# Skews the wall clock of one process. The embedded chain is exempt, because all nodes share it.
SKEWED = """
import sys, time
_now = time.time
time.time = lambda: _now() + (0.0 if sys._getframe(1).f_globals.get("__name__") == "tplr.chain.clocks" else {skew})
"""


@dataclass(frozen=True)
class ChaosAction:
    """A fault of ``node`` in the run's ``window``-th window.

    Attributes:
        seconds: duration of the fault; for ``skew``: the clock's offset.
    """

    window: int
    kind: Kind
    node: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Script:
    """The faults of a run. ``failpoints``: for each process, the failpoint that kills each start, as in ``KILL_AT``."""

    actions: tuple[ChaosAction, ...]
    failpoints: dict[str, tuple[str, ...]]


def write_script(roles: dict[str, str], *, windows: int, window_seconds: float, seed: int) -> Script:
    """Generate a script with every failpoint once, and at least one of each other fault. ``roles``: by node name."""
    rng = random.Random(seed)
    named = {role: [name for name, one in roles.items() if one == role] for role in FAILPOINTS_OF}
    miners, validators = named["miner"], named["validator"]
    failpoints: dict[str, list[FailpointName]] = {name: [] for name in roles}
    for role, steps in FAILPOINTS_OF.items():  # each failpoint kills one node of the role
        for name, step in zip(itertools.cycle(named[role]), rng.sample(steps, len(steps)), strict=False):
            failpoints[name].append(step)
    last = max(FIRST_WINDOW + 1, windows - QUIET_WINDOWS)

    def window() -> int:
        return rng.randint(FIRST_WINDOW, last - 1)

    actions = [
        *(ChaosAction(window(), "kill", rng.choice([*roles])) for _ in range(RANDOM_KILLS)),
        ChaosAction(window(), "pause", rng.choice(miners), 1.5 * window_seconds),
        ChaosAction(window(), "pause", rng.choice(validators), 1.5 * window_seconds),
        ChaosAction(window(), "storage", seconds=2.5 * window_seconds),
        ChaosAction(window(), "chain", seconds=2.5 * window_seconds),
        ChaosAction(window(), "garbage", rng.choice(miners)),
        ChaosAction(window(), "skew", rng.choice(miners), rng.choice([-1, 1]) * SKEW_SECONDS),
    ]
    counted = {
        name: tuple(f"{step}:{1 if step in RARE_FAILPOINTS else rng.randint(2, 3)}" for step in steps)
        for name, steps in failpoints.items()
    }
    return Script(tuple(sorted(actions, key=lambda action: action.window)), counted)


@dataclass
class Chaos:
    """Executes a script on an open network, and restarts processes that end.

    Attributes:
        done: count of each action.
        quiet_from: number of the run's windows when all nodes had caught up after the last fault; None before.
    """

    net: Localnet
    script: Script
    done: Counter[str] = field(default_factory=Counter)
    quiet_from: int | None = None

    def __post_init__(self) -> None:
        self._failpoints = {name: [*failpoints] for name, failpoints in self.script.failpoints.items()}
        self._armed: dict[str, str] = {}
        self._skewed: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Execute the script while the block lasts."""
        self.net.lenient = True
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for child in self.net.nodes.values():
                child.resume()
            logger.info("chaos actions: %s", ", ".join(f"{what}: {count}" for what, count in self.done.items()))

    @property
    def over(self) -> bool:
        """Whether the network had ``QUIET_WINDOWS`` to recover, after all windows of the outages were applied."""
        return self.quiet_from is not None and self.net.view.completed >= self.quiet_from + QUIET_WINDOWS

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, name in enumerate(self.net.nodes):
                group.create_task(self._keep_alive(name, FIRST_WINDOW + number))
            for action in self.script.actions:
                await self._wait_for(action.window)
                group.create_task(self._do(action))
            await self._wait_for(self.net.plan.windows - QUIET_WINDOWS)
            for name in [*self._armed]:
                self._count(f"killed {name}")
                self.net.nodes[name].kill()
                self._failpoints[name].append(self._armed.pop(name))
            if left := {name: failpoints for name, failpoints in self._failpoints.items() if failpoints}:
                logger.warning("failpoints not reached: %s; give more --windows or a longer --window-seconds", left)
            self._failpoints.clear()
            await self._wait_for_all(await self.net.window())
            self.quiet_from = self.net.view.completed
            logger.info("chaos: all nodes have caught up in window %d of the run", self.quiet_from)

    async def _wait_for(self, window: int) -> None:
        while self.net.view.furthest < window:  # noqa: ASYNC110 - a view has no event to wait for
            await asyncio.sleep(POLL_SECONDS)

    async def _wait_for_all(self, window: int) -> None:
        """Wait until every node has applied a window."""
        while any((node.window or 0) < window for node in self.net.view.honest):  # noqa: ASYNC110 - as above
            await asyncio.sleep(POLL_SECONDS)

    async def _keep_alive(self, name: str, first: int) -> None:
        """Restart a node whenever it ends, with its next failpoint; the first restart is in window ``first``."""
        child = self.net.nodes[name]
        while True:
            if first and self.net.view.furthest >= first:
                first = 0
                self._count(f"killed {name}")
                child.kill()
            if not child.running:
                if (armed := self._armed.pop(name, None)) and child.died == -signal.SIGKILL:
                    self._count(f"{name} killed at {armed.partition(':')[0]}")
                elif armed:  # it ended before the failpoint
                    self._failpoints[name].insert(0, armed)
                await asyncio.sleep(RESTART_SECONDS)
                child.start(self._environment(name))
            await asyncio.sleep(POLL_SECONDS)

    def _environment(self, name: str) -> dict[str, str]:
        environment = {}
        if failpoints := self._failpoints.get(name):
            self._armed[name] = environment[KILL_AT] = failpoints.pop(0)
        if skew := self._skewed.get(name):
            folder = self.net.network.folder / "skewed" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "sitecustomize.py").write_text(SKEWED.format(skew=skew))
            inherited = process_variables().get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), inherited]))
        return environment

    async def _do(self, action: ChaosAction) -> None:
        net, what = self.net, f"{action.kind} {action.node}".strip()
        self._count(what)
        match action.kind:
            case "kill":
                net.nodes[action.node].kill()
            case "pause":
                net.nodes[action.node].pause()
                await asyncio.sleep(action.seconds)
                net.nodes[action.node].resume()
            case "storage":
                net.storage.kill()
                await asyncio.sleep(action.seconds)
                net.storage.start()
            case "chain":
                # All blocks of that time appear at its end, as after an outage of the connection to the chain.
                await _lock_chain(net.network.chain, action.seconds)
            case "garbage":
                await self._write_garbage(action.node)
            case "skew":
                self._skewed[action.node] = action.seconds
                net.nodes[action.node].kill()

    async def _write_garbage(self, name: str) -> None:
        """Overwrite a node's past and next updates, and fill its bucket with objects under the network's keys."""
        setup = next(node for node in self.net.network.nodes if node.name == name)
        uid, version = self.net.view.nodes[name].uid or 0, self.net.network.hparams.version
        now = self.net.view.newest
        junk = random.Random(uid).randbytes
        windows = range(max(0, now - 9), now + 3)
        keys = [make(window, uid, version) for window in windows for make in (gradient_key, debug_key)]
        keys += [commit_key(now + 5, uid, version), "nonsense", checkpoint_prefix(now, uid, version) + "manifest.json"]
        keys += [f"gradient-{number}-{number}-v9.9.9.safetensors" for number in range(GARBAGE_OBJECTS - len(keys))]
        async with S3Connections(self.net.endpoint) as connections:
            store = connections.store(setup.account.writable)
            for key in keys:
                with contextlib.suppress(StoreError):  # the storage may be down
                    await store.put(key, junk(997))

    def _count(self, what: str) -> None:
        self.done[what] += 1
        logger.info("chaos, window %d of the run: %s", self.net.view.furthest, what)


async def _lock_chain(chain: Path, seconds: float) -> None:
    """Lock the chain's file for ``seconds``: no process can add a block."""
    database = sqlite3.connect(chain, isolation_level=None, timeout=5.0)
    try:
        database.execute("BEGIN IMMEDIATE")
        await asyncio.sleep(seconds)
        database.execute("ROLLBACK")
    finally:
        database.close()

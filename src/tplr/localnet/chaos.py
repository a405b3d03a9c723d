"""What ``tplr localnet --chaos`` does to a network: a script that follows from the seed, and who carries it out."""

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tplr.errors import StoreError
from tplr.keys import checkpoint_prefix, commit_key, debug_key, gradient_key
from tplr.localnet.supervisor import Localnet
from tplr.logging import logger
from tplr.node.failpoints import FAILPOINTS, KILL_AT, FailpointName
from tplr.storage import S3Connections

Kind = Literal["kill", "pause", "storage", "chain", "garbage", "skew"]

FIRST_WINDOW = 2  # of the run; before it nothing happens
QUIET_WINDOWS = 8  # at the end: whoever was down has time to come back
MORE_DEATHS = 3  # processes that are killed anywhere
SKEW_SECONDS = 150.0  # what is told at start is 300
GARBAGE_OBJECTS = 120
RESTART_SECONDS = 1.0
POLL_SECONDS = 0.2

AGGREGATOR_FAILPOINTS: tuple[FailpointName, ...] = ("found", "kept", "included", "aggregated")
VALIDATOR_FAILPOINTS: tuple[FailpointName, ...] = (
    "gathered",
    "looked",
    "scored",
    "applied",
    "reported",
    "saved",
    "publishing",
)
MINER_FAILPOINTS: tuple[FailpointName, ...] = (*FAILPOINTS[: FAILPOINTS.index("published") + 1],)
SELDOM: tuple[FailpointName, ...] = ("publishing", "published")  # once in several windows

# Moves the wall clock of one process. The embedded chain is exempt: it is not this machine's, it is everybody's.
SKEWED = """
import sys, time
_now = time.time
time.time = lambda: _now() + (0.0 if sys._getframe(1).f_globals.get("__name__") == "tplr.chain.clocks" else {skew})
"""


@dataclass(frozen=True)
class ChaosAction:
    """Something done to ``node`` in the run's ``window``-th window, for ``seconds`` if it has a length."""

    window: int
    kind: Kind
    node: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Script:
    """``failpoints``: at which passing of which step each process is to end, one life after the other."""

    actions: tuple[ChaosAction, ...]
    failpoints: dict[str, tuple[str, ...]]


def write_script(roles: dict[str, str], *, windows: int, window_seconds: float, seed: int) -> Script:
    """Every named step once, and one or more of everything else, spread over the run. ``roles``: by node name."""
    draw = random.Random(seed)
    miners = [name for name, role in roles.items() if role == "miner"]
    failpoints: dict[str, list[FailpointName]] = {name: [] for name in roles}
    for number, step in enumerate(draw.sample(MINER_FAILPOINTS, len(MINER_FAILPOINTS))):
        failpoints[miners[number % len(miners)]].append(step)
    for role, steps in (("validator", VALIDATOR_FAILPOINTS), ("aggregator", AGGREGATOR_FAILPOINTS)):
        for name in [name for name, one in roles.items() if one == role][:1]:
            failpoints[name] += draw.sample(steps, len(steps))
    last = max(FIRST_WINDOW + 1, windows - QUIET_WINDOWS)

    def when() -> int:
        return draw.randint(FIRST_WINDOW, last - 1)

    actions = [
        *(ChaosAction(when(), "kill", draw.choice([*roles])) for _ in range(MORE_DEATHS)),
        ChaosAction(when(), "pause", draw.choice(miners), 1.5 * window_seconds),
        ChaosAction(when(), "pause", "validator", 1.5 * window_seconds),
        ChaosAction(when(), "storage", seconds=2.5 * window_seconds),
        ChaosAction(when(), "chain", seconds=2.5 * window_seconds),
        ChaosAction(when(), "garbage", draw.choice(miners)),
        ChaosAction(when(), "skew", draw.choice(miners), draw.choice([-1, 1]) * SKEW_SECONDS),
    ]
    counted = {
        name: tuple(f"{step}:{1 if step in SELDOM else draw.randint(2, 3)}" for step in steps)
        for name, steps in failpoints.items()
    }
    return Script(tuple(sorted(actions, key=lambda action: action.window)), counted)


@dataclass
class Chaos:
    """Carries out a script on an open network, and starts anew whoever ends meanwhile.

    Attributes:
        done: how often each thing was done.
    """

    net: Localnet
    script: Script
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._failpoints = {name: [*failpoints] for name, failpoints in self.script.failpoints.items()}
        self._armed: dict[str, str] = {}
        self._skewed: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def reigning(self) -> AsyncIterator[None]:
        """Until the block ends."""
        self.net.lenient = True
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for child in self.net.nodes.values():
                child.resume()
            logger.info("chaos did: %s", ", ".join(f"{what} {count} times" for what, count in self.done.items()))

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
                logger.warning("nobody ended at %s: ask for more --windows, or longer ones", left)
            self._failpoints.clear()

    async def _wait_for(self, window: int) -> None:
        while self.net.view.furthest < window:  # noqa: ASYNC110 - the view is renewed, nobody tells
            await asyncio.sleep(POLL_SECONDS)

    async def _keep_alive(self, name: str, first: int) -> None:
        """Start a node whenever it has ended, with its next fuse; in window ``first`` it gets the first one."""
        child = self.net.nodes[name]
        while True:
            if first and self.net.view.furthest >= first:
                first = 0
                self._count(f"killed {name}")
                child.kill()
            if not child.running:
                if (armed := self._armed.pop(name, None)) and child.died == -signal.SIGKILL:
                    self._count(f"{name} ended at {armed.partition(':')[0]}")
                elif armed:  # it ended before it came there, or could not even start
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
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
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
                # Blocks of that time are there at once when it ends, as with a node of the chain that was out of reach.
                await _held(net.network.chain, action.seconds)
            case "garbage":
                await self._litter(action.node)
            case "skew":
                self._skewed[action.node] = action.seconds
                net.nodes[action.node].kill()

    async def _litter(self, name: str) -> None:
        """Overwrite a node's updates, old and to come, and fill its bucket with what looks like the network's."""
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
                with contextlib.suppress(StoreError):  # the store may be down, too
                    await store.put(key, junk(997))

    def _count(self, what: str) -> None:
        self.done[what] += 1
        logger.info("chaos in window %d of the run: %s", self.net.view.furthest, what)


async def _held(chain: Path, seconds: float) -> None:
    """Let nobody write the chain's file, and so make a block, for a while."""
    database = sqlite3.connect(chain, isolation_level=None, timeout=5.0)
    try:
        database.execute("BEGIN IMMEDIATE")
        await asyncio.sleep(seconds)
        database.execute("ROLLBACK")
    finally:
        database.close()

"""A chain file, an S3 server and a data set, on which tests run any number of roles in this process."""

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from catching_up import OpenCatchUp, open_catch_up

from tplr import cli
from tplr.chain.clocks import ManualClock
from tplr.chain.local import LocalChain
from tplr.cli import reported
from tplr.clock import WindowClock
from tplr.comms import Comms
from tplr.compress.layout import PayloadSpec
from tplr.hparams import HParams
from tplr.localnet.dataset import SUBFOLDER, prepared_corpus, upload_dataset
from tplr.localnet.network import (
    NETUID,
    Network,
    NodeSetup,
    create_chain,
    lay_out,
    node_command,
    node_environment,
)
from tplr.localnet.plan import BLOCK_SECONDS, make_plan
from tplr.node.data_loader import WindowDataLoader
from tplr.node.replica import NodeContext, Replica
from tplr.node.sources import PageDataSource
from tplr.pages.dataset import PageDataset
from tplr.schemas import Bucket
from tplr.storage import S3Connections
from tplr.telemetry import Telemetry
from tplr.testing.s3server import Rules, Server, serve
from tplr.training import model
from tplr.training.model import build_model
from tplr.training.schemes import payload_spec

T = TypeVar("T")
CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"


class Stage:
    """The environment of roles, and their events."""

    def __init__(
        self,
        network: Network,
        hparams: HParams,
        server: Server,
        stack: contextlib.AsyncExitStack,
        clock: ManualClock | None = None,
    ) -> None:
        self.clock = clock
        self.own_aggregator = False
        self.network = network
        self.hparams = hparams
        self.server = server
        self.events: list[dict[str, Any]] = []
        self._stack = stack

    def setup(self, name: str) -> NodeSetup:
        return next(node for node in self.network.nodes if node.name == name)

    def folder(self, name: str) -> Path:
        return self.network.folder / name

    async def drive(self, awaitable: Awaitable[T]) -> T:
        """Return the result of a coroutine; with a manual clock, time passes in the meantime."""
        return await (self.clock.drive(awaitable, step=0.5) if self.clock else awaitable)

    async def pass_windows(self, windows: int, *clocks: WindowClock) -> None:
        """Advance the manual clock until all ``clocks`` have seen this number of further windows."""
        assert self.clock is not None
        goals = [clock.window + windows for clock in clocks]
        while any(clock.window < goal for clock, goal in zip(clocks, goals, strict=True)):
            seen = [clock.block for clock in clocks]
            self.clock.advance(BLOCK_SECONDS)
            for _ in range(20):  # a slot can be without a block
                await asyncio.sleep(0.002)
                if all(clock.block > block for clock, block in zip(clocks, seen, strict=True)):
                    break

    async def context(self, setup: NodeSetup) -> NodeContext:
        """Return the context of a node to start, which is registered on chain unless it is an aggregator."""
        opened = LocalChain(self.network.chain, setup.hotkey, netuid=NETUID, clock=self.clock)
        chain = await self._stack.enter_async_context(opened)
        connections = await self._stack.enter_async_context(S3Connections(self.server.endpoint))
        comms = Comms(
            chain,
            self.hparams,
            connections,
            own_bucket=setup.account.writable,
            aggregator_bucket=self._aggregates(setup),
            folder=self.network.folder / "states",
        )
        if setup.role != "aggregator":
            await self.drive(comms.try_commit(setup.account.readable))
        await comms.refresh()

        def listen(event: dict[str, Any]) -> None:
            self.events.append({**event, "node": setup.name})

        telemetry = Telemetry(role=setup.role, uid=comms.uid, listeners=(listen,))
        return NodeContext(comms=comms, clock=comms.clock, telemetry=telemetry)

    def _aggregates(self, setup: NodeSetup) -> Bucket | None:
        """The aggregator's bucket; None: the leading validator publishes in its own."""
        account = self.network.aggregator.account
        return (account.writable if setup.role == "aggregator" else account.readable) if self.own_aggregator else None

    async def node(self, setup: NodeSetup, *, closed: bool = True) -> tuple[Replica, WindowDataLoader, NodeContext]:
        """Return a started node; ``closed``: it is closed in order with the stage."""
        context = await self.context(setup)
        connections = await self._stack.enter_async_context(S3Connections(self.server.endpoint))
        tokenizer = self.hparams.load_tokenizer(self.network.folder)
        dataset = await PageDataset.open([connections.store(self.network.dataset.readable)], SUBFOLDER, tokenizer)
        replica, data_loader = (
            self.replica(setup, context),
            WindowDataLoader(PageDataSource(dataset, self.hparams), context.comms),
        )
        if closed:
            await self._stack.enter_async_context(replica)
            await self._stack.enter_async_context(data_loader)
        return replica, data_loader, context

    def replica(self, setup: NodeSetup, context: NodeContext) -> Replica:
        return Replica(build_model(self.hparams), self.hparams, context, self.folder(setup.name))

    def of(self, kind: str, node: str) -> list[dict[str, Any]]:
        """Return events by kind, and by role or name of the node."""
        return [event for event in self.events if event["event"] == kind and node in (event["role"], event["node"])]

    def held(self, node: str) -> dict[int, str]:
        """Return the digest of the model after each window, from the node's last report."""
        return {event["window"]: event["digest"] for event in self.of("applied", node)}

    def make_spec(self) -> PayloadSpec:
        return payload_spec(self.hparams)

    async def until(self, condition: Callable[[], object], *, seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def running(self, *coroutines: Any) -> AsyncIterator[list[asyncio.Task[None]]]:
        """Tasks that end with the block, in any state."""
        tasks = [asyncio.ensure_future(one) for one in coroutines]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


Staging = Callable[..., contextlib.AbstractAsyncContextManager[Stage]]


@pytest.fixture
def first_weights_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the first weights of one node at a time: all nodes of a test share the process's random generator."""
    draw, turn = model._draw, threading.Lock()

    def draw_in_turn(*args: Any) -> None:
        with turn:
            draw(*args)

    monkeypatch.setattr(model, "_draw", draw_in_turn)


@pytest.fixture
def staged(tmp_path: Path, first_weights_in_turn: None) -> Staging:
    """Opens a stage: numbers of ``miners`` and ``validators``, a scheme, changed constants.

    ``by_hand``: blocks come in ``pass_windows``. ``dated_by_hand``: and objects are dated by this clock.
    """

    @contextlib.asynccontextmanager
    async def opened(
        miners: int = 1,
        scheme: str = "demo",
        *,
        validators: int = 1,
        by_hand: bool = False,
        dated_by_hand: bool = False,
        own_aggregator: bool = False,
        **constants: Any,
    ) -> AsyncIterator[Stage]:
        options = {"miners": miners, "validators": validators, "scheme": scheme, "vocab_size": 512, "cache": CACHE}
        plan = make_plan(windows=8, run_dir=tmp_path / "run", **options)
        corpus = await asyncio.to_thread(prepared_corpus, plan.cache, plan.corpus, plan.vocab_size)
        network = lay_out(plan, corpus)
        tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        changes = {
            "model": network.hparams.model.model_copy(update=tiny),
            "pages_per_window": 1,
            # 6 s, including 4 s of waiting for a missing update.
            "blocks_per_window": 12,
            "time_window_delta_seconds": 2,
            "manifest_timeout_seconds": 0,
            "commit_margin_seconds": 0.5,
            "peer_list_window_margin": 1,
            "validator_offset": 1,
            "probation_windows": 0,
        }
        hparams = network.hparams.model_copy(update=changes | constants)
        async with contextlib.AsyncExitStack() as stack:
            clock = ManualClock(time.time()) if by_hand else None
            dates = {}
            if clock and dated_by_hand:
                dates = {"clock": clock.now, "rules": Rules(one_write_per_second=False, max_clock_skew=1e12)}
            server = await stack.enter_async_context(serve(network.storage, network.keys, **dates))
            await upload_dataset(corpus, network.dataset.writable, server.endpoint)
            create_chain(network, plan.seed, clock=clock)
            if clock is None:
                await asyncio.sleep(2 * BLOCK_SECONDS)  # until all registrations are in a block
            stage = Stage(network, hparams, server, stack, clock)
            stage.own_aggregator = own_aggregator
            yield stage

    return opened


@pytest.fixture
def catch_up(staged: Staging) -> OpenCatchUp:
    """Opens a recorded run and a newcomer: a scheme, changed constants."""
    return functools.partial(open_catch_up, staged)


Command = Callable[..., Awaitable[int]]


@pytest.fixture
def command(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs ``tplr explain`` or ``tplr audit`` as an operator with the miner's wallet and environment; exit status."""
    setup = stage.setup("miner-1")
    for name, value in node_environment(stage.network, setup, stage.server.endpoint).items():
        if stage.own_aggregator or not name.startswith("R2_AGGREGATOR_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(reported, "setup_logging", lambda **_: None)  # logging settings would outlive the test
    (stage.network.folder / "hparams.json").write_text(stage.hparams.model_dump_json(exclude={"sparseloco"}))
    words = [str(one) for one in node_command(stage.network, setup)]
    network = words[words.index("--netuid") : words.index("--events")]

    async def run(name: str, *asked: object) -> int:
        return await asyncio.to_thread(cli.main, [name, *network, *map(str, asked)])

    return run


@pytest.fixture
async def stage(staged: Staging) -> AsyncIterator[Stage]:
    """One miner, and a validator that aggregates and publishes a checkpoint after each window."""
    async with staged(manifest_timeout_seconds=0.5, checkpoint_frequency=1) as opened:
        yield opened

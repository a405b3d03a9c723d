"""``Localnet``: a network of processes that runs while its context is open."""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from types import TracebackType
from typing import Self

from tplr.chain.local import LocalChain
from tplr.config import process_variables
from tplr.errors import LocalnetError
from tplr.localnet.dataset import prepared_corpus, prepared_store, upload_dataset
from tplr.localnet.fork_server import ForkServer
from tplr.localnet.network import (
    READY_FILE,
    Network,
    NodeSetup,
    base_environment,
    create_chain,
    lay_out,
    node_command,
    node_environment,
    storage_command,
)
from tplr.localnet.plan import NetworkPlan
from tplr.localnet.process import Child
from tplr.localnet.restarts import Restarts
from tplr.logging import logger
from tplr.telemetry import read_events
from tplr.telemetry.events import Event
from tplr.telemetry.jsonl import START, Position
from tplr.watch.view import NetworkView

POLL_SECONDS = 0.25
STORAGE_SECONDS = 60.0  # until the storage server must listen


class Localnet:
    """A network of processes.

        async with Localnet(plan) as net:
            await net.wait_until(lambda view: view.completed >= 3)
            net.nodes["miner-1"].kill()
            net.nodes["miner-1"].start()

    Must be opened in the main thread (see ``process.Child``).

    Attributes:
        nodes: processes of the neurons by name: ``validator``, ``miner-1``, ...
        storage: process of the storage server.
        fork_server: starts the nodes, with ``--share-imports``.
        endpoint: address of the storage server.
        view: the nodes' events as last read.
        lenient: an ended process is not an error, because the caller restarts it.
    """

    network: Network
    nodes: dict[str, Child]
    storage: Child
    view: NetworkView
    endpoint: str
    lenient = False
    fork_server: ForkServer | None = None

    def __init__(self, plan: NetworkPlan) -> None:
        self.plan = plan
        self._stack = AsyncExitStack()
        self._positions: dict[str, Position] = {}
        self._restarts = Restarts()

    async def __aenter__(self) -> Self:
        """Start all processes.

        Raises:
            ConfigError: the corpus is unusable.
            LocalnetError: a process ended unexpectedly.
            StoreError: the dataset can't be uploaded.
        """
        async with AsyncExitStack() as stack:
            plan = self.plan
            corpus = await asyncio.to_thread(prepared_corpus, plan.cache, plan.corpus, plan.vocab_size)
            if plan.data == "store":
                await asyncio.to_thread(prepared_store, corpus)
            self.network = await asyncio.to_thread(lay_out, plan, corpus)
            if plan.share_imports:
                self.fork_server = self._open_fork_server(stack)
            self.endpoint = endpoint = await self._start_storage(stack)
            await upload_dataset(corpus, self.network.dataset.writable, endpoint, data=plan.data)
            await asyncio.to_thread(create_chain, self.network, plan.seed)
            roles = {node.name: node.role for node in self.network.nodes}
            self._hostile = {node.name for node in self.network.nodes if node.hostile}
            self.view = NetworkView(roles, self._hostile)
            self.nodes = {node.name: self._node(node, endpoint) for node in self.network.nodes}
            stack.push_async_callback(self._stop_nodes)
            if self.fork_server:
                await asyncio.to_thread(self.fork_server.wait_until_ready)
            for child in self.nodes.values():
                child.start()
            logger.info("starting %s; logs in %s", ", ".join(self.nodes), self.network.folder / "logs")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop every process."""
        await self._stack.aclose()

    async def views(self) -> AsyncGenerator[NetworkView, None]:
        """Yield ``view`` after each read of the events, every ``POLL_SECONDS``, without end.

        Raises:
            LocalnetError: a process ended unexpectedly.
        """
        while True:
            for name, events in (await asyncio.to_thread(self._read_events)).items():
                self.view.update(name, events)
            for name, child in self.nodes.items():
                self.view.nodes[name].running = child.running
            yield self.view
            if not self.lenient:
                self._check()
            await asyncio.sleep(POLL_SECONDS)

    async def wait_until(
        self, condition: Callable[[NetworkView], bool], *, timeout: float | None = None
    ) -> NetworkView:
        """Return the view once ``condition`` holds of it.

        Raises:
            LocalnetError: a process ended unexpectedly.
            TimeoutError: not within ``timeout`` seconds.
        """
        async with asyncio.timeout(timeout), aclosing(self.views()) as views:
            async for view in views:
                if condition(view):
                    return view
        raise AssertionError("views() is endless")

    def pids(self) -> dict[str, int]:
        """Return the ids of all started processes, including the supervisor's, by name."""
        found = {"localnet": os.getpid(), "storage": self.storage.pid} | {
            name: child.pid for name, child in self.nodes.items()
        }
        if self.fork_server:
            found["fork-server"] = self.fork_server.pid
        return {name: pid for name, pid in found.items() if pid is not None}

    async def weights(self) -> dict[int, dict[int, float]]:
        """Return the weights in force on chain: by validator's uid, then by uid."""
        async with LocalChain(self.network.chain, hotkey="") as chain:
            return await chain.weights()

    async def window(self) -> int:
        """Return the chain's present window."""
        async with LocalChain(self.network.chain, hotkey="") as chain:
            return await chain.head() // self.network.hparams.blocks_per_window

    def _check(self) -> None:
        """Raise LocalnetError if a process ended.

        A hostile node may end, and a node for which an outside service is down.
        """
        self.storage.check()
        for name, child in self.nodes.items():
            if name not in self._hostile:
                self._restarts.check(child)

    async def _start_storage(self, stack: AsyncExitStack) -> str:
        """Start the storage server, and return its address when it listens."""
        network = self.network
        ready = network.folder / READY_FILE
        self.storage = Child(
            "storage",
            storage_command(network, self.plan.port, ready),
            env=base_environment(process_variables(), network.folder / "home"),
            folder=network.folder,
            log=network.log("storage"),
        )
        stack.push_async_callback(self.storage.stop)
        self.storage.start()
        facts = json.loads(await _wait_for_file(ready, self.storage))
        # Nodes know this address, so a restarted server must use the same one.
        self.storage.command = [str(part) for part in storage_command(network, facts["port"], ready)]
        return f"http://{facts['host']}:{facts['port']}"

    def _node(self, node: NodeSetup, endpoint: str) -> Child:
        network = self.network
        return Child(
            node.name,
            node_command(network, node),
            env=node_environment(network, node, endpoint),
            folder=network.folder,
            log=network.log(node.name),
            # torchrun starts interpreters of its own.
            server=self.fork_server if node.ranks == 1 else None,
        )

    def _open_fork_server(self, stack: AsyncExitStack) -> ForkServer:
        network = self.network
        env = base_environment(process_variables(), network.folder / "home")
        server = ForkServer(env=env, folder=network.folder, log=network.log("fork-server"))
        stack.callback(server.close)
        server.open()
        return server

    async def _stop_nodes(self) -> None:
        await asyncio.gather(*(child.stop() for child in self.nodes.values()))

    def _read_events(self) -> dict[str, list[Event]]:
        found: dict[str, list[Event]] = {}
        for name in self.nodes:
            position = self._positions.get(name, START)
            events, self._positions[name] = read_events(self.network.events(name), position)
            found[name] = list(events)
        return found


async def _wait_for_file(path: Path, writer: Child) -> bytes:
    """Wait until ``writer`` has written ``path``, and return its content."""
    deadline = time.monotonic() + STORAGE_SECONDS
    while not await asyncio.to_thread(path.exists):
        writer.check()
        if time.monotonic() > deadline:
            raise LocalnetError(
                f"{writer.name} not ready after {STORAGE_SECONDS:.0f} s; the end of {writer.log}:\n{writer.log_tail()}"
            )
        await asyncio.sleep(POLL_SECONDS)
    return await asyncio.to_thread(path.read_bytes)

"""Measures the time that a node takes to join at window 200 of a recorded run, compared with fetching the same bytes.

A leading validator's bucket holds a checkpoint of window 150, and of each window the included set and the aggregate of
four miners' updates; the peers' own updates are deleted. The store is behind a proxy that limits the rate. Joining and
fetching alternate, each with an empty folder.

    python scripts/benchmarks/catch_up.py [--repetitions 3] [--rate 1.0]

Prints the medians, and writes ``docs/benchmarks/catch_up.csv`` and ``catch_up.png``.
"""

import argparse
import asyncio
import contextlib
import csv
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from pictures import redraw
from pictures_network import CATCH_UP_LIMIT
from plain_s3 import plain_client

from tplr.chain.clocks import ManualClock
from tplr.chain.local import LocalChain
from tplr.comms import Comms
from tplr.keys import included_key, state_key
from tplr.localnet.dataset import prepared_corpus
from tplr.localnet.network import NETUID, Network, NodeSetup, create_chain, lay_out
from tplr.localnet.plan import BLOCK_SECONDS, make_plan
from tplr.node.replica import NodeContext, Replica
from tplr.storage import S3Connections
from tplr.telemetry import Telemetry
from tplr.testing.s3server import serve
from tplr.training.fingerprint import digest
from tplr.training.model import build_model

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/node/support"))
from recording import Recording  # noqa: E402

FOLDER = ROOT / "docs" / "benchmarks"
MINERS = 4
START = 3
WINDOWS = 200
CHECKPOINT = 150
BLOCKS = 4  # per window


class LimitedProxy:
    """A TCP proxy that limits all connections together to ``rate`` bytes a second, and counts the bytes."""

    def __init__(self, port: int, rate: float) -> None:
        self.port = port
        self.rate = rate
        self.bytes = 0
        self._free_at = 0.0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(self._pump(reader, downstream), self._pump(upstream, writer, limited=True))
        for side in (writer, downstream):
            side.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, limited: bool = False) -> None:
        while data := await reader.read(2**14):
            if limited:
                now = time.monotonic()
                self._free_at = max(now, self._free_at) + len(data) / self.rate
                self.bytes += len(data)
                await asyncio.sleep(self._free_at - now)
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


async def context(network: Network, setup: NodeSetup, stack: contextlib.AsyncExitStack, **how: object) -> NodeContext:
    """Connect a node; ``how``: endpoint, hparams, and optionally the chain's clock."""
    chain = LocalChain(network.chain, setup.hotkey, netuid=NETUID, clock=how.get("clock"))  # type: ignore[arg-type]
    await stack.enter_async_context(chain)
    connections = await stack.enter_async_context(S3Connections(how["endpoint"]))  # type: ignore[arg-type]
    comms = Comms(chain, how["hparams"], connections, own_bucket=setup.account.writable)  # type: ignore[arg-type]
    clock = how.get("clock")
    commit = comms.try_commit(setup.account.readable)
    await (clock.drive(commit, step=BLOCK_SECONDS) if isinstance(clock, ManualClock) else commit)
    await comms.refresh()
    task = asyncio.create_task(comms.clock.run())
    stack.callback(task.cancel)
    if not isinstance(clock, ManualClock):
        await comms.clock.wait_for_block(0)
    return NodeContext(
        comms=comms, clock=comms.clock, telemetry=Telemetry(role=setup.role, uid=comms.uid, listeners=())
    )


async def record(network: Network, endpoint: str, stack: contextlib.AsyncExitStack, how: dict) -> Recording:
    """Record the run in simulated time that ends about now."""
    seconds = (START + WINDOWS + 8) * BLOCKS * BLOCK_SECONDS
    clock = ManualClock(time.time() - seconds)
    await asyncio.to_thread(create_chain, network, 0, clock=clock)
    nodes = [
        (await context(network, setup, stack, clock=clock, endpoint=endpoint, **how)).comms
        for setup in network.nodes
        if setup.role in ("validator", "miner") and setup.name != f"miner-{MINERS + 1}"
    ]
    await nodes[0].refresh()
    recording = Recording(nodes[0], nodes[1:], how["hparams"], start=START, folder=network.folder / "recording")
    clock.advance((START + WINDOWS + 4) * BLOCKS * BLOCK_SECONDS)
    await recording.begin()
    for number in range(WINDOWS):
        # Windows before the checkpoint are not read.
        await recording.record(updates=False, senders=None if number >= CHECKPOINT else 1)
        if number + 1 == CHECKPOINT:
            await recording.checkpoint()
        if number % 20 == 19:
            print(f"recorded {number + 1} of {WINDOWS} windows", flush=True)
    return recording


async def join(network: Network, endpoint: str, how: dict, recording: Recording, folder: Path) -> float:
    async with contextlib.AsyncExitStack() as stack:
        newcomer = await context(network, network.nodes[MINERS + 1], stack, endpoint=endpoint, **how)
        model = build_model(how["hparams"])
        began = time.perf_counter()
        async with Replica(model, how["hparams"], newcomer, folder) as replica:
            await replica.open(START)
            await replica.advance(until=recording.window)
            seconds = time.perf_counter() - began
            assert replica.window == recording.window
            assert digest(replica.train_state.parameters) == digest(recording.train_state.parameters)
    return seconds


async def fetch(network: Network, endpoint: str, how: dict, recording: Recording) -> float:
    """Get the checkpoint's shards of model and outer scheme, and all later sets and aggregates, by plain GETs."""
    async with contextlib.AsyncExitStack() as stack:
        newcomer = await context(network, network.nodes[MINERS + 1], stack, endpoint=endpoint, **how)
        leader = newcomer.comms.highest_stake_validator()
        bucket = None if leader is None else newcomer.comms.get_bucket(leader)
        assert bucket is not None
        client = await stack.enter_async_context(plain_client(endpoint, bucket))
        checkpoint = await newcomer.comms.get_latest_checkpoint()
        assert checkpoint is not None
        shards = [info.key for info in await checkpoint.store.list(checkpoint.prefix)]
        version = how["hparams"].version
        windows = range(checkpoint.window, recording.window)
        keys = [
            make
            for window in windows
            for make in (included_key(window, version), state_key("aggregator", window, 0, version))
        ]
        needed = [key for key in shards if not key.endswith(".json")][: recording_shards(how)] + keys
        slots = asyncio.Semaphore(4)

        async def one(key: str) -> None:
            async with slots:
                body = (await client.get_object(Bucket=bucket.name, Key=key))["Body"]
                while await body.read(2**20):
                    pass

        began = time.perf_counter()
        await asyncio.gather(*map(one, needed))
        return time.perf_counter() - began


def recording_shards(how: dict) -> int:
    """Number of shards that a newcomer needs of a small model's snapshot: the model, and the shared tensors."""
    return 2 if how["hparams"].outer == "sparseloco" else 1


async def measure(repetitions: int, rate: float) -> list[dict[str, float]]:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        cache = ROOT / ".cache/tplr/localnet"
        plan = make_plan(miners=MINERS + 1, windows=8, run_dir=Path(name) / "run", cache=cache)
        corpus = await asyncio.to_thread(prepared_corpus, plan.cache, plan.corpus, plan.vocab_size)
        network = await asyncio.to_thread(lay_out, plan, corpus)
        how = {"hparams": network.hparams.model_copy(update={"blocks_per_window": BLOCKS})}
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(serve(network.storage, network.keys))
            async with contextlib.AsyncExitStack() as recorded:
                recording = await record(network, server.endpoint, recorded, how)
            proxy = LimitedProxy(int(server.endpoint.rpartition(":")[2]), rate)
            endpoint = await stack.enter_async_context(proxy.open())
            for repetition in range(repetitions):
                row: dict[str, float] = {}
                for kind in ("join", "fetch")[:: 1 if repetition % 2 else -1]:
                    before = proxy.bytes
                    if kind == "join":
                        row["join, s"] = await join(network, endpoint, how, recording, Path(name) / f"new-{repetition}")
                    else:
                        row["fetch, s"] = await fetch(network, endpoint, how, recording)
                    row[f"{kind}, MB"] = (proxy.bytes - before) / 1e6
                row["join to fetch"] = row["join, s"] / row["fetch, s"]
                print(row, flush=True)
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--rate", type=float, default=1.0, help="rate of the proxy, MB per second (default: %(default)s)"
    )
    args = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    rows = asyncio.run(measure(args.repetitions, args.rate * 1e6))
    for name in rows[0]:
        low, middle, high = statistics.quantiles([row[name] for row in rows], n=4, method="inclusive")
        limit = f"   limit {CATCH_UP_LIMIT}" if name == "join to fetch" else ""
        print(f"{name:16} {middle:10.3f}   [{low:.3f}, {high:.3f}]{limit}")
    with (FOLDER / "catch_up.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    redraw("catch_up")


if __name__ == "__main__":
    main()

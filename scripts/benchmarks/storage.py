"""Throughput and peak memory of our transfers and of a gather, beside plain aiobotocore and boto3.

One server (R2's rules, a process of its own), one process for each client, all in one run, all files on one file
system. In every repetition the clients do the same job one right after the other, in changing order, so that a busy
machine slows all of them alike; each ratio is of one repetition, and the median of all counts. Before each job the disk
is synced, so that nobody waits for what another has left to it; and each job is done twice in a row, and the second
counts. A virtual machine's host takes back memory that nobody used for seconds, and whoever needs it next waits until
it comes: so before each round of jobs as much as the largest needs is used and freed.

On loopback all wait for the processor. As users have it, the network is what they wait for, so the large jobs are
repeated over a link of 1 Gbit/s each way, which all connections of a client share: a relay in a process of its own.

    python scripts/benchmarks/storage.py [--repetitions 5]

Prints the medians, and writes ``docs/benchmarks/storage.csv``, ``storage.png`` and the table in ``storage.md``.
"""

import argparse
import asyncio
import base64
import contextlib
import csv
import hashlib
import json
import mmap
import operator
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, TypedDict

from blake3 import blake3

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
MIB = 2**20
SIZES = (1, 32, 256)  # MiB
PEERS, PEER_MIB = 15, 16
WANTED = 0.9  # of the throughput of plain calls
CLIENTS = ("ours", "aiobotocore, unsigned", "aiobotocore, checked", "aiobotocore", "boto3")
BASE, CHECKED = CLIENTS[1:3]
DOES_NOT = {"read": {CHECKED}}  # where a client is no other than one before it
LINK_BYTES = 10**9 // 8  # a second, each way
SLOW_REPETITIONS = 3
LOOPBACK, LINK = "loopback", "1 Gbit/s"
TOUCHED = 2**30  # bytes: the largest file twice, and as much again
ACCOUNT = "a" * 32


def keys_of(peer: int) -> tuple[str, str]:
    """Access key id and secret of bucket ``peer``: a client each, as peers on the network have."""
    return hashlib.md5(b"%d" % peer).hexdigest(), hashlib.sha256(b"%d" % peer).hexdigest()  # noqa: S324


def bucket_of(peer: int) -> str:
    return f"bucket-{peer}"


# --- the worker: one client, jobs on standard input ---------------------------------------------------------------


def memory(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{field}:")[2].split()[0])


class Known(TypedDict):
    """What a checkpoint's manifest says of an object; ``blake3``, of all of it, is for who checks in one go."""

    size: int
    blake3: str
    blake3s: list[str]


def touch_memory() -> None:
    """Have the host lend the memory that the next job will use, for files or for itself."""
    with mmap.mmap(-1, TOUCHED, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE):
        pass


def known_of(body: bytes) -> Known:
    from tplr.storage.parts import cut

    blake3s = [blake3(body[part.start : part.stop]).hexdigest() for part in cut(len(body))]
    return {"size": len(body), "blake3": blake3(body).hexdigest(), "blake3s": blake3s}


class Ours:
    """``tplr.storage`` and ``tplr.exchange``."""

    async def open(self, stack: AsyncExitStack, endpoint: str) -> None:
        from tplr.schemas import Bucket
        from tplr.storage import S3Connections

        connections = await stack.enter_async_context(S3Connections(endpoint))
        self.stores = [
            connections.store(
                Bucket(name=bucket_of(peer), account_id=ACCOUNT, access_key_id=key, secret_access_key=secret)
            )
            for peer, (key, secret) in enumerate(map(keys_of, range(PEERS)))
        ]

    async def put(self, key: str, path: Path) -> None:
        from tplr.storage import upload_file

        await upload_file(self.stores[0], key, path)

    async def get(self, key: str, path: Path, known: Known) -> None:
        from tplr.storage import download_file

        if path.name.startswith("small"):  # as documents and updates are read
            await self.stores[0].get_file(key, path, max_bytes=2**40)
        else:
            await download_file(self.stores[0], key, path, size=known["size"], blake3s=known["blake3s"])

    async def read(self, key: str) -> None:
        await self.stores[0].get(key, max_bytes=2**40)

    async def put_peers(self, body: bytes) -> None:
        from tplr.exchange.gather import HASH_FIELD

        sha256 = hashlib.sha256(body).hexdigest()
        commits = [await store.put("commit", b"", metadata={HASH_FIELD: sha256}) for store in self.stores]
        self.start = max(commit.last_modified for commit in commits)
        for store in self.stores:
            await store.put("update", body)

    async def gather(self) -> int:
        from tplr.exchange.gather import GatherRules, gather
        from tplr.schemas import UploadBounds

        rules = GatherRules(
            window=1,
            key_of=lambda uid: "update",
            commit_key_of=lambda uid: "commit",
            bounds=UploadBounds(start=self.start, end=time.time() + 60),
            closes_in=0.0,
            patience=60.0,
            size=PEER_MIB * MIB,
            parse=lambda body, uid: body,
        )
        result = await gather(range(PEERS), self.stores.__getitem__, rules)
        assert result.bytes == PEERS * PEER_MIB * MIB, result.skipped
        return result.bytes


class Aiobotocore:
    """Its calls, one for each object, with the two settings without which R2 refuses them."""

    signed = True

    async def open(self, stack: AsyncExitStack, endpoint: str) -> None:
        from aiobotocore.config import AioConfig
        from aiobotocore.session import AioSession

        session = AioSession()
        config = AioConfig(
            signature_version="s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=64,
            s3={"addressing_style": "path"} | ({} if self.signed else {"payload_signing_enabled": False}),
        )
        self.clients = [
            await stack.enter_async_context(
                session.create_client(
                    "s3",
                    endpoint_url=endpoint,
                    region_name="auto",
                    aws_access_key_id=key,
                    aws_secret_access_key=secret,
                    config=config,
                )
            )
            for key, secret in map(keys_of, range(PEERS))
        ]

    async def put(self, key: str, path: Path) -> None:
        with path.open("rb") as file:
            await self.clients[0].put_object(Bucket=bucket_of(0), Key=key, Body=file)

    async def get(self, key: str, path: Path, known: Known) -> None:
        answer = await self.clients[0].get_object(Bucket=bucket_of(0), Key=key)
        with path.open("wb") as file:
            async for chunk in answer["Body"].iter_chunks(MIB):
                file.write(chunk)

    async def read(self, key: str) -> None:
        answer = await self.clients[0].get_object(Bucket=bucket_of(0), Key=key)
        await answer["Body"].read()

    async def gather(self) -> int:
        async def get(peer: int) -> bytes:
            answer = await self.clients[peer].get_object(Bucket=bucket_of(peer), Key="update")
            async with answer["Body"] as body:
                return await self.checked(await body.read())

        bodies = await asyncio.gather(*map(get, range(PEERS)))
        return sum(map(len, bodies))

    async def checked(self, body: bytes) -> bytes:
        return body


class Unsigned(Aiobotocore):
    """As we send: without a SHA-256 of the body in the signature."""

    signed = False


class Checked(Unsigned):
    """With our checks: MD5 of what is sent, BLAKE3 of what comes, SHA-256 of what is gathered."""

    async def put(self, key: str, path: Path) -> None:
        with path.open("rb") as file:
            md5 = base64.b64encode((await asyncio.to_thread(hashlib.file_digest, file, "md5")).digest()).decode()
            file.seek(0)
            await self.clients[0].put_object(Bucket=bucket_of(0), Key=key, Body=file, ContentMD5=md5)

    async def get(self, key: str, path: Path, known: Known) -> None:
        answer = await self.clients[0].get_object(Bucket=bucket_of(0), Key=key)
        found = blake3()
        with path.open("wb") as file:
            async for chunk in answer["Body"].iter_chunks(MIB):
                file.write(chunk)
                found.update(chunk)
        assert found.hexdigest() == known["blake3"]

    async def checked(self, body: bytes) -> bytes:
        await asyncio.to_thread(hashlib.sha256, body)
        return body


class Boto3:
    """Its transfer manager, in parts and threads, as it comes."""

    async def open(self, stack: AsyncExitStack, endpoint: str) -> None:
        import boto3
        from botocore.config import Config

        key, secret = keys_of(0)
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="auto",
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            config=Config(
                signature_version="s3v4",
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path"},
            ),
        )
        stack.callback(self.client.close)

    async def put(self, key: str, path: Path) -> None:
        self.client.upload_file(str(path), bucket_of(0), key)

    async def get(self, key: str, path: Path, known: Known) -> None:
        self.client.download_file(bucket_of(0), key, str(path))

    async def read(self, key: str) -> None:
        self.client.get_object(Bucket=bucket_of(0), Key=key)["Body"].read()


KINDS: dict[str, Any] = dict(zip(CLIENTS, (Ours, Unsigned, Checked, Aiobotocore, Boto3), strict=True))


async def work(kind: str, endpoint: str) -> None:
    """Answer each job with its seconds, this process's CPU seconds, and its peak memory above idle, in bytes."""
    client: Any = KINDS[kind]()
    async with AsyncExitStack() as stack:
        await client.open(stack, endpoint)
        idle = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            job = json.loads(line)
            jobs: dict[str, Callable[[], Awaitable[Any]]] = {
                "put": lambda: client.put(job["key"], Path(job["path"])),  # noqa: B023 - done within its turn
                "get": lambda: client.get(job["key"], Path(job["path"]), job["known"]),  # noqa: B023
                "read": lambda: client.read(job["key"]),  # noqa: B023
                "prepare": lambda: client.put_peers(bytes(PEER_MIB * MIB)),
                "gather": lambda: client.gather(),  # noqa: PLW0108 - boto3 has none
            }
            Path("/proc/self/clear_refs").write_text("5")  # noqa: ASYNC240 - the peak begins anew
            began, cpu = time.perf_counter(), time.process_time()
            await jobs[job["do"]]()
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            idle = idle or memory("VmRSS")  # after a first small job: everything is imported and connected
            print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": memory("VmHWM") - idle}), flush=True)


# --- the link: what goes through it takes its time ------------------------------------------------------------------


class Lane:
    """One direction of a link, for all its connections."""

    def __init__(self) -> None:
        self.free_at = 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while data := await reader.read(2**16):
                now = time.perf_counter()
                # Who comes late, as sleepers do, makes up for it.
                self.free_at = max(self.free_at, now - 0.005) + len(data) / LINK_BYTES
                await asyncio.sleep(self.free_at - now)
                writer.write(data)
                await writer.drain()


async def relay(endpoint: str) -> None:
    """Print the port of a link to ``endpoint``, and serve until standard input ends."""
    up, down = Lane(), Lane()
    host, port = endpoint.removeprefix("http://").split(":")

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(up.carry(reader, there), down.carry(back, writer))

    async with await asyncio.start_server(connect, host, 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


# --- the run ------------------------------------------------------------------------------------------------------


def started(*arguments: str) -> subprocess.Popen[str]:
    """This script in a process of its own, talked to by its standard input and output."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nowhere",
        "OMP_NUM_THREADS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


class Worker:
    """A client in a process of its own."""

    def __init__(self, kind: str, endpoint: str) -> None:
        self.process = started("--worker", kind, "--endpoint", endpoint)

    def do(self, **job: Any) -> dict[str, float]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def start_server(folder: Path, stack: ExitStack) -> str:
    """The endpoint of a new server, which ends with ``stack``."""
    table = {}
    for peer in range(PEERS):
        key, secret = keys_of(peer)
        table[key] = {"secret": secret, "buckets": {bucket_of(peer): "read-write"}}
    (folder / "keys.json").write_text(json.dumps(table))
    command = [sys.executable, "-m", "tplr.localnet.s3server", "--root", folder / "objects", "--port", "0"]
    command += ["--no-write-rate", "--keys", folder / "keys.json", "--ready-file", folder / "ready.json"]
    server = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
    stack.callback(server.wait)
    stack.callback(server.send_signal, signal.SIGTERM)
    while not (folder / "ready.json").exists():
        time.sleep(0.05)
    ready = json.loads((folder / "ready.json").read_text())
    return f"http://{ready['host']}:{ready['port']}"


def start_link(endpoint: str, stack: ExitStack) -> str:
    """The endpoint of a new link to ``endpoint``, which ends with ``stack``."""
    process = started("--relay", "--endpoint", endpoint)
    assert process.stdin
    assert process.stdout
    stack.callback(process.wait)
    stack.callback(process.stdin.close)
    return f"http://127.0.0.1:{int(process.stdout.readline())}"


def run(repetitions: int, folder: Path) -> list[dict[str, Any]]:
    """One row for each job, client and repetition."""
    rows: list[dict[str, Any]] = []

    def once(worker: Worker, **job: Any) -> dict[str, float]:
        target.unlink(missing_ok=True)
        return worker.do(**job)

    def measure(
        do: str, mib: int, repetition: int, workers: dict[str, Worker], link: str = LOOPBACK, **more: Any
    ) -> None:
        order = [kind for kind in workers if kind not in DOES_NOT.get(do, ())]
        order = order[repetition % len(order) :] + order[: repetition % len(order)]
        touch_memory()
        for kind in order:
            os.sync()
            once(workers[kind], do=do, **more)
            result = once(workers[kind], do=do, **more)
            if repetition > 0:  # the first warms up: connections, disk, allocators
                rows.append({"link": link, "job": do, "MiB": mib, "client": kind, "repetition": repetition} | result)

    with ExitStack() as stack:
        endpoint = start_server(folder, stack)
        workers = {kind: Worker(kind, endpoint) for kind in CLIENTS}
        for worker in workers.values():
            stack.callback(worker.end)
        target, block = folder / "small", os.urandom(MIB)
        (folder / "tiny").write_bytes(b"x")
        for worker in workers.values():
            worker.do(do="put", key="tiny", path=str(folder / "tiny"))
        for mib in SIZES:
            (folder / f"{mib}").write_bytes(block * mib)
            workers["ours"].do(do="put", key=f"stored-{mib}", path=str(folder / f"{mib}"))

        def files(mib: int, repetition: int, workers: dict[str, Worker], link: str = LOOPBACK) -> None:
            nonlocal target
            target = folder / ("small" if mib == SIZES[0] else "large")
            source = folder / f"{mib}"
            # The key is always the same: what is replaced leaves its memory to the next.
            if mib < SIZES[-1] or link == LINK or repetition <= repetitions:
                measure("put", mib, repetition, workers, link, key="put", path=str(source))
            known = known_of(source.read_bytes())
            measure("get", mib, repetition, workers, link, key=f"stored-{mib}", path=str(target), known=known)

        for mib in SIZES:
            for repetition in range(3 * repetitions + 1):  # all but the largest puts are quick, and noisy
                files(mib, repetition, workers)
                measure("read", mib, repetition, workers, key=f"stored-{mib}")
        # New processes: what the large transfers left in the allocator is not the gather's.
        both = {kind: Worker(kind, endpoint) for kind in ("ours", BASE, CHECKED)}
        slow_endpoint = start_link(endpoint, stack)
        slow = {kind: Worker(kind, slow_endpoint) for kind in ("ours", BASE, "boto3")}
        for worker in (*both.values(), *slow.values()):
            stack.callback(worker.end)
            worker.do(do="put", key="tiny", path=str(folder / "tiny"))
        both["ours"].do(do="prepare")
        for repetition in range(repetitions + 1):
            measure("gather", PEERS * PEER_MIB, repetition, both)
        for mib in SIZES[1:]:
            for repetition in range(SLOW_REPETITIONS + 1):
                files(mib, repetition, slow, LINK)
        slow = {kind: Worker(kind, slow_endpoint) for kind in ("ours", BASE)}
        for worker in slow.values():
            stack.callback(worker.end)
            worker.do(do="put", key="tiny", path=str(folder / "tiny"))
        slow["ours"].do(do="prepare")
        for repetition in range(SLOW_REPETITIONS + 1):
            measure("gather", PEERS * PEER_MIB, repetition, slow, LINK)
    return rows


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median MiB/s and peak of each job and client; of ours also the ratios to the others, with their quartiles."""
    what = operator.itemgetter("link", "job", "MiB")
    seconds = {(*what(row), row["client"], row["repetition"]): row["seconds"] for row in rows}
    summary = []
    for link, job, mib, client in dict.fromkeys((*what(row), row["client"]) for row in rows):
        mine = [row for row in rows if (*what(row), row["client"]) == (link, job, mib, client)]
        ratios = [row["seconds"] / seconds[link, job, mib, "ours", row["repetition"]] for row in mine]
        low, middle, high = statistics.quantiles(ratios, n=4)
        summary.append({
            "link": link,
            "job": job,
            "MiB": mib,
            "client": client,
            "MiB/s": statistics.median(mib / row["seconds"] for row in mine),
            "cpu ms": 1000 * statistics.median(row["cpu"] for row in mine) / mib,
            "peak MiB": max(row["peak"] for row in mine) / MIB,
            "ours/it": middle,
            "low": low,
            "high": high,
        })  # fmt: skip
    return summary


def table(summary: list[dict[str, Any]]) -> str:
    """Every job and client, and what is missed of what is wanted of ours against plain calls."""
    lines = [
        f"{line['link']:8}  {line['job']:6} {line['MiB']:4} MiB  {line['client']:21} {line['MiB/s']:7.1f} MiB/s  "
        f"cpu {line['cpu ms']:5.2f} ms/MiB  peak {line['peak MiB']:6.1f} MiB  "
        f"ours/it {line['ours/it']:.2f} ({line['low']:.2f} to {line['high']:.2f})"
        for line in summary
    ]
    large = [line for line in summary if line["client"] == BASE and line["MiB"] > SIZES[0]]
    missed = [
        f"{line['job']} {line['MiB']} MiB {line['ours/it']:.2f} ({line['link']})"
        for line in large
        if line["ours/it"] < WANTED
    ]
    lines.append(f"less than {WANTED} of {BASE}: {', '.join(missed) or 'none'}")
    peak = max(line["peak MiB"] for line in summary if (line["job"], line["client"]) == ("gather", "ours"))
    allowed = PEERS * PEER_MIB + 100
    lines.append(f"peak memory of our gather: {peak:.0f} MiB of {allowed} allowed")
    return "".join(f"{line}\n" for line in lines)


def draw(summary: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    what = operator.itemgetter("link", "job", "MiB")
    jobs = list(dict.fromkeys(map(what, summary)))
    figure, (speed, peak) = plt.subplots(2, 1, figsize=(13, 7), sharex=True)
    for place, client in enumerate(CLIENTS):
        lines = [line for line in summary if line["client"] == client]
        at = [jobs.index(what(line)) + 0.17 * (place - 2) for line in lines]
        speed.bar(at, [line["MiB/s"] for line in lines], 0.16, label=client)
        peak.bar(at, [max(0, line["peak MiB"]) for line in lines], 0.16, label=client)
    speed.set_ylabel("MiB/s, median")
    peak.set_ylabel("peak memory above idle, MiB")
    peak.set_yscale("symlog")
    sizes = {PEERS * PEER_MIB: f"{PEERS} × {PEER_MIB}"}
    names = [f"{job}\n{sizes.get(mib, mib)} MiB" + ("" if link == LOOPBACK else f"\n{link}") for link, job, mib in jobs]
    peak.set_xticks(range(len(jobs)), names)
    speed.legend(frameon=False)
    for axes in (speed, peak):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--worker", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--relay", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker or args.relay:
        asyncio.run(work(args.worker, args.endpoint) if args.worker else relay(args.endpoint))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = run(args.repetitions, Path(folder))
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "storage.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    summary = summarise(rows)
    draw(summary, FOLDER / "storage.png")
    text = table(summary)
    print(text)
    page = FOLDER / "storage.md"
    before, _, rest = page.read_text().partition("```\n")
    page.write_text(before + "```\n" + text + "```\n" + rest.partition("```\n")[2])


if __name__ == "__main__":
    main()

"""Measures throughput, processor time and peak memory of transfers and of a gather, against plain aiobotocore.

One server with R2's rules and one process for each client, all on one machine and one file system. In every repetition
the clients do the same job one right after the other, in rotating order. Each ratio is of one repetition; the median is
reported. Before each job the disk is synced. Each job runs twice in a row, and the second run is reported: the host of
a virtual machine reclaims memory that was idle for a second, so 768 MiB are used and freed before it. The large jobs
are repeated over a relay that limits each direction to 1 Gbit/s, for all connections of a client together.

    python scripts/benchmarks/storage.py [--repetitions 5] [--before DIRECTORY] [--candidates]

``--before`` adds this project's client from another source tree, ``--candidates`` the clients of
``storage_candidates.py`` (``pip install obstore``). Prints the medians, and writes ``docs/benchmarks/storage.csv`` and
the table in ``storage.md``.
"""

import argparse
import csv
import json
import mmap
import operator
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pictures import redraw
from s3_process import start_server
from storage_worker import CLIENTS, MIB, PEER_MIB, PEERS, bucket_of, keys_of, known_of

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
SOURCE = Path(__file__).parents[2] / "src"
SIZES = (1, 32, 256)  # MiB
WANTED = 0.9  # minimum share of the throughput of plain calls
OURS, BEFORE, BASE = CLIENTS[:3]
SLOW_REPETITIONS = 3
LOOPBACK, LINK = "loopback", "1 Gbit/s"
TOUCHED = 768 * MIB  # three times the largest file


def touch_memory() -> None:
    """Make the host provide the memory that the next job will use, for files or for itself."""
    with mmap.mmap(-1, TOUCHED, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE):
        pass


def started(script: str, *arguments: str, source: Path = SOURCE) -> subprocess.Popen[str]:
    """A script of this folder in a separate process, driven over its standard input and output."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nowhere",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(source),
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


class Worker:
    """A client in a separate process."""

    def __init__(self, kind: str, endpoint: str, source: Path) -> None:
        self.process = started("storage_worker.py", kind, endpoint, source=source)

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


def key_table() -> dict[str, Any]:
    """Return the key table with a bucket for each peer."""
    table = {}
    for peer in range(PEERS):
        key, secret = keys_of(peer)
        table[key] = {"secret": secret, "buckets": {bucket_of(peer): "read-write"}}
    return table


def start_link(endpoint: str, stack: ExitStack) -> str:
    """Start a link to ``endpoint`` that ends with ``stack``; return its endpoint."""
    process = started("slow_link.py", endpoint)
    assert process.stdin
    assert process.stdout
    stack.callback(process.wait)
    stack.callback(process.stdin.close)
    return f"http://127.0.0.1:{int(process.stdout.readline())}"


def run(repetitions: int, folder: Path, sources: dict[str, Path]) -> list[dict[str, Any]]:
    """Return one row for each job, client and repetition. ``sources`` is the source tree of each client."""
    rows: list[dict[str, Any]] = []

    def once(worker: Worker, **job: Any) -> dict[str, float]:
        target.unlink(missing_ok=True)
        return worker.do(**job)

    def measure(
        do: str, mib: int, repetition: int, workers: dict[str, Worker], link: str = LOOPBACK, **more: Any
    ) -> None:
        order = list(workers)
        order = order[repetition % len(order) :] + order[: repetition % len(order)]
        for kind in order:
            os.sync()
            once(workers[kind], do=do, **more)
            touch_memory()
            result = once(workers[kind], do=do, **more)
            if repetition > 0:  # the first warms up: connections, disk, allocators
                rows.append({"link": link, "job": do, "MiB": mib, "client": kind, "repetition": repetition} | result)

    def start_workers(endpoint: str) -> dict[str, Worker]:
        workers = {kind: Worker(kind, endpoint, source) for kind, source in sources.items()}
        for worker in workers.values():
            stack.callback(worker.end)
            worker.do(do="put", key="tiny", path=str(folder / "tiny"))
        return workers

    with ExitStack() as stack:
        (folder / "tiny").write_bytes(b"x")
        endpoint = start_server(folder, stack, key_table(), "--no-write-rate")
        workers = start_workers(endpoint)
        target, block = folder / "small", os.urandom(MIB)
        # A separate process stores the objects for the gets, because a large upload leaves memory in the allocator.
        storing = Worker(OURS, endpoint, sources[OURS])
        for mib in SIZES:
            (folder / f"{mib}").write_bytes(block * mib)
            storing.do(do="put", key=f"stored-{mib}", path=str(folder / f"{mib}"))
        storing.end()

        def files(mib: int, repetition: int, workers: dict[str, Worker], link: str = LOOPBACK) -> None:
            nonlocal target
            target = folder / ("small" if mib == SIZES[0] else "large")
            source = folder / f"{mib}"
            # The key is always the same, so a replaced object's memory is reused for the next one.
            measure("put", mib, repetition, workers, link, key="put", path=str(source))
            known = known_of(source.read_bytes())
            measure("get", mib, repetition, workers, link, key=f"stored-{mib}", path=str(target), known=known)

        for mib in SIZES:
            for repetition in range(repetitions + 1):
                files(mib, repetition, workers)
                measure("read", mib, repetition, workers, key=f"stored-{mib}")
        # New processes, so that memory that large transfers left in the allocator does not count for the gather.
        slow_endpoint = start_link(endpoint, stack)
        for link, gatherers in ((LOOPBACK, start_workers(endpoint)), (LINK, start_workers(slow_endpoint))):
            gatherers[OURS].do(do="prepare")
            for repetition in range(repetitions + 1):
                for job in ("gather", "gather by hash"):
                    measure(job, PEERS * PEER_MIB, repetition, gatherers, link)
        slow = start_workers(slow_endpoint)
        for mib in SIZES[1:]:
            for repetition in range(SLOW_REPETITIONS + 1):
                files(mib, repetition, slow, LINK)
    return rows


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median MiB/s and peak of each job and client; for ours also the ratios to the others, with
    quartiles."""
    what = operator.itemgetter("link", "job", "MiB")
    seconds = {(*what(row), row["client"], row["repetition"]): row["seconds"] for row in rows}
    summary = []
    for link, job, mib, client in dict.fromkeys((*what(row), row["client"]) for row in rows):
        mine = [row for row in rows if (*what(row), row["client"]) == (link, job, mib, client)]
        ratios = [row["seconds"] / seconds[link, job, mib, OURS, row["repetition"]] for row in mine]
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
    """Return the lines of the table; the last ones name the jobs where ours is below ``WANTED`` of plain calls."""
    lines = [
        f"{line['link']:8}  {line['job']:14} {line['MiB']:4} MiB  {line['client']:21} {line['MiB/s']:7.1f} MiB/s  "
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
    peak = max(line["peak MiB"] for line in summary if (line["job"], line["client"]) == ("gather", OURS))
    allowed = PEERS * PEER_MIB + 100
    lines.append(f"peak memory of our gather: {peak:.0f} MiB of {allowed} allowed")
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--before", type=Path, help="source tree (src) of an earlier version")
    parser.add_argument("--candidates", action="store_true")
    args = parser.parse_args()
    kinds = [OURS, *([BEFORE] if args.before else []), BASE, *(CLIENTS[3:] if args.candidates else [])]
    sources = {kind: args.before if kind == BEFORE else SOURCE for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        rows = run(args.repetitions, Path(folder), sources)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "storage.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    summary = summarise(rows)
    redraw("storage")
    text = table(summary)
    print(text)
    page = FOLDER / "storage.md"
    before, _, rest = page.read_text().partition("```\n")
    page.write_text(before + "```\n" + text + "```\n" + rest.partition("```\n")[2])


if __name__ == "__main__":
    main()

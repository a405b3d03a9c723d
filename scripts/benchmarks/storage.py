"""Throughput and peak memory of our transfers and of a gather, beside plain aiobotocore and boto3.

One server (R2's rules, a process of its own), one process for each client, all in one run, all files on one file
system. In every repetition the clients do the same job one right after the other, in changing order, so that a busy
machine slows all of them alike; each ratio is of one repetition, and the median of all counts. Before each job the disk
is synced, so that nobody waits for what another has left to it; and each job is done twice in a row, and the second
counts. A virtual machine's host takes back memory that nobody used for a second, and whoever needs it next waits until
it comes: so right before each job that counts as much as the largest needs is used and freed.

On loopback all wait for the processor. As users have it, the network is what they wait for, so the large jobs are
repeated over a link of 1 Gbit/s each way, which all connections of a client share: a relay in a process of its own.

    python scripts/benchmarks/storage.py [--repetitions 5]

Prints the medians, and writes ``docs/benchmarks/storage.csv``, ``storage.png`` and the table in ``storage.md``.
"""

import argparse
import csv
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pictures import redraw
from storage_worker import CLIENTS, MIB, PEER_MIB, PEERS, bucket_of, keys_of, known_of

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
SIZES = (1, 32, 256)  # MiB
WANTED = 0.9  # of the throughput of plain calls
BASE, CHECKED = CLIENTS[1:3]
DOES_NOT = {"read": {CHECKED}}  # where a client is no other than one before it
SLOW_REPETITIONS = 3
LOOPBACK, LINK = "loopback", "1 Gbit/s"
TOUCHED = 768 * MIB  # the largest file twice, and as much as one again


def touch_memory() -> None:
    """Have the host lend the memory that the next job will use, for files or for itself."""
    with mmap.mmap(-1, TOUCHED, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE):
        pass


def started(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A script of this folder in a process of its own, talked to by its standard input and output."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nowhere",
        "OMP_NUM_THREADS": "1",
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
    """A client in a process of its own."""

    def __init__(self, kind: str, endpoint: str) -> None:
        self.process = started("storage_worker.py", kind, endpoint)

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
    command = [sys.executable, "-m", "tplr.testing.s3server", "--root", folder / "objects", "--port", "0"]
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
    process = started("slow_link.py", endpoint)
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
        for kind in order:
            os.sync()
            once(workers[kind], do=do, **more)
            touch_memory()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(args.repetitions, Path(folder))
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

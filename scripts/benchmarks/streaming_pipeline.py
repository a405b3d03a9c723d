"""Pipelines alone, over samples in memory: samples per second, worker processes, read-ahead behind a shuffle.

Each job runs in a separate process, and measures its sides one after the other, in an order that changes with the
repetition. A ratio compares two sides of one repetition; the result is the median over repetitions. With ``--before``
the jobs also run with the package of another checkout, whose sides are called "before".

    python scripts/benchmarks/streaming_pipeline.py [--repetitions 5] [--only JOB ...] [--before SRC]

Epochraft is compared if it is installed. Writes ``docs/benchmarks/streaming_pipeline.csv`` and
``streaming_pipeline.png``, and prints the medians. ``--only`` replaces the rows of these jobs.
"""

import argparse
import csv
import importlib.util
import itertools
import json
import operator
import os
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
SOURCE = Path(__file__).parents[2] / "src"
OURS, BEFORE = "tplr.data", "before"
SAMPLES = 300_000
BUFFER, BATCH = 1000, 32

# Side of a job -> name of a measure -> value.
Figures = dict[str, dict[str, float]]
# Side of a job -> the function that measures it.
Sides = dict[str, Callable[[], dict[str, float]]]


# --- plain: the same operations as a pipeline, and as a chain of generators -----------------------------------------


def renamed(sample: dict[str, int]) -> dict[str, int]:
    return {"number": sample["id"]}


def wanted(sample: dict[str, int]) -> int:
    return sample["number"] % 4


def generator_chain(samples: Iterable[Any]) -> Iterator[Any]:
    """map, filter, shuffle and batch as plain generators, without a library."""

    def mapped(source: Iterable[Any]) -> Iterator[Any]:
        for sample in source:
            yield renamed(sample)

    def filtered(source: Iterable[Any]) -> Iterator[Any]:
        for sample in source:
            if wanted(sample):
                yield sample

    def shuffled(source: Iterable[Any]) -> Iterator[Any]:
        rng = random.Random(42)
        buffer = []
        for sample in source:
            buffer.append(sample)
            if len(buffer) == BUFFER:
                place = rng.randrange(BUFFER)
                buffer[place], buffer[-1] = buffer[-1], buffer[place]
                yield buffer.pop()
        while buffer:
            place = rng.randrange(len(buffer))
            buffer[place], buffer[-1] = buffer[-1], buffer[place]
            yield buffer.pop()

    def batched(source: Iterable[Any]) -> Iterator[Any]:
        batch = []
        for sample in source:
            batch.append(sample)
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    return batched(shuffled(filtered(mapped(samples))))


def plain() -> Sides:
    """Return the samples per second of processor time of ``map | filter | shuffle | batch``."""
    samples = [{"id": i} for i in range(SAMPLES)]

    def pipeline(source: Any) -> Any:
        return source.map(renamed).filter(wanted).shuffle(BUFFER).batch(BATCH, collate_fn=list)

    sides: Sides = {
        OURS: lambda: cpu_rate(pipeline(our_sequence(samples)), SAMPLES),
        "generators": lambda: cpu_rate(generator_chain(samples), SAMPLES),
    }
    if importlib.util.find_spec("epochraft"):
        sides["epochraft"] = lambda: cpu_rate(pipeline(their_sequence(samples)), SAMPLES)
    return sides


# --- processes: parallel_map with worker processes and with threads -------------------------------------------------


def processes() -> Sides:
    """Return the samples per second of ``parallel_map`` with a cheap function, in two worker processes and in two
    threads."""
    samples = [{"id": i} for i in range(50_000)]

    def mapped(executor: str) -> dict[str, float]:
        with our_sequence(samples).parallel_map(renamed, 2, executor_type=executor).iter() as iterator:
            deque(itertools.islice(iterator, 2000), maxlen=0)  # starts the processes, which takes a second
            return rate(iterator, len(samples) - 2000)

    return {OURS: lambda: mapped("process"), "threads": lambda: mapped("thread")}


# --- shuffle: parallel_map, whose read-ahead takes positions of the source, behind a shuffle ------------------------


def behind_shuffle(buffer: int) -> Sides:
    """Return the samples per second of processor time of ``parallel_map`` of a cheap function in two threads, and of
    ``map``, both behind ``shuffle(buffer)``."""
    samples = [{"id": i} for i in range(50_000)]

    def mapped(step: str, *workers: int) -> dict[str, float]:
        shuffled = our_sequence(samples, repeat=True).shuffle(buffer)
        with getattr(shuffled, step)(renamed, *workers).iter() as iterator:
            deque(itertools.islice(iterator, 1000), maxlen=0)  # fills the buffer
            return cpu_rate(itertools.islice(iterator, 10_000), 10_000)

    return {OURS: lambda: mapped("parallel_map", 2), "map": lambda: mapped("map")}


# --------------------------------------------------------------------------------------------------------------------

JOBS: dict[str, Callable[[], Sides]] = {
    "plain": plain,
    "processes": processes,
    **{f"shuffle {buffer}": partial(behind_shuffle, buffer) for buffer in (1000, 10_000, 100_000)},
}


def our_sequence(samples: list[Any], *, repeat: bool = False) -> Any:
    from tplr.data import CheckpointableDataset

    return CheckpointableDataset.from_sequence(samples, repeat)


def their_sequence(samples: list[Any]) -> Any:
    from epochraft import CheckpointableDataset  # pyright: ignore[reportMissingImports]

    return CheckpointableDataset.from_sequence(samples)


def rate(items: Iterable[Any], samples: int) -> dict[str, float]:
    """Read all items, which consist of the given number of samples; return samples per second."""
    began = time.perf_counter()
    deque(items, maxlen=0)
    return {"samples_per_s": samples / (time.perf_counter() - began)}


def cpu_rate(items: Iterable[Any], samples: int) -> dict[str, float]:
    """Like ``rate``, in processor time, for work in one thread: other load on the machine affects it least."""
    began = time.process_time()
    deque(items, maxlen=0)
    return {"samples_per_cpu_s": samples / (time.process_time() - began)}


def work(job: str, repetition: int) -> None:
    """Measure the sides of a job once, after a warm-up of each."""
    sides = JOBS[job]()
    for measure in sides.values():
        measure()
    order = list(sides)
    turn = repetition % len(order)
    print(json.dumps({side: sides[side]() for side in order[turn:] + order[:turn]}), flush=True)


def measured(job: str, repetition: int, source: Path) -> Figures:
    run = subprocess.run(
        [sys.executable, __file__, "--work", job, str(repetition)],
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[-1])


def measure(jobs: list[str], repetitions: int, before: Path | None) -> list[dict[str, Any]]:
    """Return one row for each job, side, repetition and measure."""
    rows = []
    for repetition, job in itertools.product(range(repetitions), jobs):
        versions = [(OURS, SOURCE)] + ([(BEFORE, before)] if before else [])
        for version, source in versions[:: -1 if repetition % 2 else 1]:
            for side, figures in measured(job, repetition, source).items():
                if side != OURS and version == BEFORE:
                    continue
                name = version if side == OURS else side
                rows += [
                    {"job": job, "side": name, "repetition": repetition, "measure": what, "value": value}
                    for what, value in figures.items()
                ]
        print(f"repetition {repetition + 1} of {repetitions}: {job}", file=sys.stderr, flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each job, measure and side: its median, and the ratio of ours to it."""
    key = operator.itemgetter("job", "measure", "side", "repetition")
    values = {key(row): float(row["value"]) for row in rows}
    yield "| job | measure | side | median | ours / it |\n|---|---|---|---|---|"
    for job, what, side in dict.fromkeys(key[:3] for key in values):
        found = {name[3]: value for name, value in values.items() if name[:3] == (job, what, side)}
        ratios = sorted(values[job, what, OURS, repetition] / value for repetition, value in found.items() if value)
        told = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else ""
        yield f"| {job} | {what} | {side} | {statistics.median(found.values()):,.4g} | {told} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=JOBS, help="jobs (default: all)")
    parser.add_argument("--before", type=Path, help="src of the other version")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work[0], int(args.work[1]))
        return
    from pictures import redraw

    jobs, path = args.only or list(JOBS), FOLDER / "streaming_pipeline.csv"
    kept = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["job"] in JOBS and row["job"] not in jobs]
    rows = measure(jobs, args.repetitions, args.before)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + rows)
    redraw("streaming_pipeline")
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()

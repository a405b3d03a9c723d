"""Time and size of a pipeline's state, and of a resume after ten million samples, in two versions of the package.

Each job runs in a process of its own with one version's source tree, the versions in alternating order; imports are not
measured. ``state``: ``state_dict()`` behind ``concat_chunk(1024).shuffle(10000)``, of tokens below 50,000, five times
in a row as a run that saves checkpoints does; the first is reported by itself. The others: seconds from a new dataset
to the next sample, from a state after ``--samples`` samples of one source.

    python scripts/benchmarks/stream_state.py --before DIRECTORY [--repetitions 3] [--samples 10000000]

``--before`` is the other version's ``src``. Writes ``docs/benchmarks/stream_state.csv`` and ``stream_state.png``, and
prints the medians.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
SOURCE = Path(__file__).parents[2] / "src"
CHUNK, BUFFER, VOCABULARY = 1024, 10_000, 50_000
STATES = 5


def state(folder: Path, samples: int) -> dict[str, float]:
    import numpy as np

    from tplr.data import CheckpointableDataset, save_state

    rng = np.random.default_rng(0)
    documents = [{"input_ids": rng.integers(0, VOCABULARY, 800)} for _ in range(3000)]
    dataset = CheckpointableDataset.from_sequence(documents, repeat=True).concat_chunk(CHUNK).shuffle(BUFFER)
    with dataset.iter() as chunks:
        wall, processor = [], []
        for _ in range(STATES):
            next(chunks)
            begin, used = time.perf_counter(), time.process_time()
            saved = chunks.state_dict()
            wall.append(time.perf_counter() - begin)
            processor.append(time.process_time() - used)
    arrays = sum(array.numel() * array.element_size() for array in saved["arrays"].values())
    size = arrays + len(json.dumps({**saved, "arrays": None}))
    save_state(folder / "state", saved)
    return {
        "first_seconds": wall[0],
        "seconds": statistics.median(wall[1:]),
        "cpu_seconds": statistics.median(processor[1:]),
        "bytes": size,
        "bytes_per_token": size / (CHUNK * (BUFFER - 1)),
        "file_bytes": (folder / "state").stat().st_size,
    }


def resume(make: Callable[[Path, int], Any]) -> Callable[[Path, int], dict[str, float]]:
    def measured(folder: Path, samples: int) -> dict[str, float]:
        with make(folder, samples).iter() as fresh:
            for _ in islice(fresh, samples):
                pass
            saved = fresh.state_dict()
            expected = next(fresh)
        begin = time.perf_counter()
        with make(folder, samples).iter(state_dict=saved) as resumed:
            found = next(resumed)
        seconds = time.perf_counter() - begin
        assert found == expected, (found, expected)
        return {"resume_seconds": seconds}

    return measured


def jsonl(folder: Path, samples: int) -> Any:
    from tplr.data import CheckpointableDataset

    return CheckpointableDataset.from_files(str(folder / "records.jsonl"))


def sequence(folder: Path, samples: int) -> Any:
    from tplr.data import CheckpointableDataset

    return CheckpointableDataset.from_sequence(range(samples + 1000))


def order(folder: Path, samples: int) -> Any:
    from tplr.data import CheckpointableDataset, Order

    return CheckpointableDataset.from_order(Order.of(range(samples + 1000), "numbers").permute(1))


JOBS: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "state": state,
    "resume from_files": resume(jsonl),
    "resume from_sequence": resume(sequence),
    "resume from_order": resume(order),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="src of the other version")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(JOBS[args.job[0]](Path(args.job[1]), args.samples)), flush=True)
        return
    from pictures import redraw

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "records.jsonl").open("w") as file:
            file.writelines(f'{{"id": {number}}}\n' for number in range(args.samples + 1000))
        for repetition in range(args.repetitions):
            sides = [("before", args.before), ("now", SOURCE)]
            for job in JOBS:
                for version, source in sides if repetition % 2 else reversed(sides):
                    command = [sys.executable, __file__, "--job", job, folder, "--samples", str(args.samples)]
                    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
                    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
                    for measure, value in json.loads(output.splitlines()[-1]).items():
                        row = {"job": job, "version": version, "repetition": repetition, "measure": measure}
                        rows.append({**row, "value": value})
                print(f"repetition {repetition + 1} of {args.repetitions}: {job}", file=sys.stderr, flush=True)
    with (FOLDER / "stream_state.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print("| job | measure | before | now |\n|---|---|---|---|")
    for job, measure in dict.fromkeys((row["job"], row["measure"]) for row in rows):
        before, now = (
            statistics.median(
                row["value"] for row in rows if (row["job"], row["measure"], row["version"]) == (job, measure, version)
            )
            for version in ("before", "now")
        )
        print(f"| {job} | {measure} | {before:.6g} | {now:.6g} |")
    redraw("stream_state")


if __name__ == "__main__":
    main()

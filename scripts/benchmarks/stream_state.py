"""Time and size of a pipeline's state, and of a resume after ten million samples, in two versions of the package.

Each job runs in a separate process with one version's source tree, the versions in alternating order; imports are not
measured. ``state``: ``state_dict()`` behind ``concat_chunk(1024).shuffle(10000)``, of tokens below 50,000, five times
in a row, as in a run that saves checkpoints; the first one is reported separately. The other jobs: seconds from a new
iterator to the next sample, from a state after ``--samples`` samples of one source. That state is taken after the first
sample and its position is moved, which gives the same state as reading; the next sample is checked.

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
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
SOURCE = Path(__file__).parents[2] / "src"
CHUNK, BUFFER, VOCABULARY = 1024, 10_000, 50_000
STATES = 5


def state(folder: Path, samples: int) -> dict[str, float]:
    import numpy as np

    from tplr.data import CheckpointableDataset, save_state

    saved: dict[str, Any] = {}
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


def moved(position: Any, key: str, value: int) -> Any:
    """Return ``position`` with another number under ``key``, at any depth."""
    if isinstance(position, list):
        return [moved(item, key, value) for item in position]
    if not isinstance(position, dict):
        return position
    return {name: value if name == key else moved(item, key, value) for name, item in position.items()}


def resume(dataset: Any, key: str, value: int, expected: Any) -> dict[str, float]:
    """Return the seconds until the first sample after a state with ``key`` set to ``value``."""
    with dataset.iter() as fresh:
        next(fresh)
        saved = fresh.state_dict()
    saved["position"] = moved(saved["position"], key, value)
    begin = time.perf_counter()
    with dataset.iter(state_dict=saved) as resumed:
        found = next(resumed)
    seconds = time.perf_counter() - begin
    assert found == expected, (found, expected)
    return {"resume_seconds": seconds}


def resume_files(folder: Path, samples: int) -> dict[str, float]:
    from tplr.data import CheckpointableDataset

    offset = int((folder / "offset").read_text())
    dataset = CheckpointableDataset.from_files(str(folder / "records.jsonl"))
    return resume(dataset, "place", offset, {"id": samples})


def resume_sequence(folder: Path, samples: int) -> dict[str, float]:
    from tplr.data import CheckpointableDataset

    dataset = CheckpointableDataset.from_sequence(range(samples + 1000))
    with dataset.iter() as fresh:
        key = "next" if "next" in fresh.state_dict()["position"] else "index"
    return resume(dataset, key, samples, samples)


JOBS: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "state": state,
    "resume from_files": resume_files,
    "resume from_sequence": resume_sequence,
}


def write_records(folder: Path, samples: int) -> None:
    """Write a file of more records than ``samples``, and the offset at which the first ``samples`` records end."""
    with (folder / "records.jsonl").open("w") as file:
        file.writelines(f'{{"id": {number}}}\n' for number in range(samples))
        (folder / "offset").write_text(str(file.tell()))
        file.writelines(f'{{"id": {number}}}\n' for number in range(samples, samples + 1000))


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
        write_records(Path(folder), args.samples)
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

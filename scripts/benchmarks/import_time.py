"""What importing this package costs beside importing torch, as ratios.

Each repetition starts one fresh interpreter for each module, one right after the other, so that a busy machine slows
all of them alike; each ratio is of one repetition, and the median of all is what counts.

    python scripts/benchmarks/import_time.py [--repetitions 15]

Writes ``docs/benchmarks/import_time.csv`` and ``import_time.png``.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from pictures import redraw

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
BASE = "torch"
# A module of ours as it is, and after torch: what it adds for a process that needs torch anyway.
STATEMENTS = {
    "torch": "import torch",
    "tplr": "import tplr",
    "torch, tplr": "import torch, tplr",
    "torch, tplr.chain": "import torch, tplr.chain",
    "torch, tplr.comms": "import torch, tplr.comms",
    "torch, tplr.node.miner": "import torch, tplr.node.miner",
    "torch, bittensor": "import torch, bittensor",
}
TIMED = "import time; begun = time.perf_counter(); {}; print(time.perf_counter() - begun)"


def measure(statement: str) -> float:
    """Seconds that ``statement`` takes in a fresh interpreter without environment or home."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", TIMED.format(statement)]
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    for statement in STATEMENTS.values():
        measure(statement)  # fills the disk cache and writes the byte code
    rows = [{name: measure(statement) for name, statement in STATEMENTS.items()} for _ in range(repetitions)]
    ratios = {name: [row[name] / row[BASE] for row in rows] for name in STATEMENTS}

    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "import_time.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["import", "repetition", "seconds", f"ratio to {BASE}"])
        for name in STATEMENTS:
            for number, row in enumerate(rows):
                writer.writerow([name, number, f"{row[name]:.4f}", f"{ratios[name][number]:.4f}"])
    redraw("import_time")
    for name, found in ratios.items():
        added = statistics.median(row[name] - row[BASE] for row in rows)
        print(f"{name:24} ratio {statistics.median(found):5.2f}   beyond torch {added:+.2f} s")


if __name__ == "__main__":
    main()

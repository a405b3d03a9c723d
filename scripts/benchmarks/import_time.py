"""Measures the import time of this package, as a ratio to the import time of torch and transformers.

A repetition starts one fresh interpreter for each statement, one right after the other, so that load from other
processes affects all statements equally. Each ratio compares two times of the same repetition; the result is the median
ratio.

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
BASE = "torch, transformers"
HELP = (
    "import contextlib, io, tplr.cli\nwith contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): "
)
STATEMENTS = {
    BASE: "import torch, transformers",
    "torch": "import torch",
    "tplr": "import tplr",
    "tplr --help": HELP + "tplr.cli.main(['--help'])",
    "tplr miner --help": HELP + "tplr.cli.main(['miner', '--help'])",
    "tplr.chain": "import tplr.chain",
    "tplr.storage": "import tplr.storage",
    "tplr.comms": "import tplr.comms",
    "tplr.node.miner": "import tplr.node.miner",
    "tplr.node.validator": "import tplr.node.validator",
}
TIMED = "import time; begun = time.perf_counter()\n{}\nprint(time.perf_counter() - begun)"


def measure(statement: str) -> float:
    """Return the seconds that ``statement`` takes in a fresh interpreter with an empty environment and home."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        if path := os.environ.get("PYTHONPATH"):
            environment["PYTHONPATH"] = path
        command = [sys.executable, "-c", TIMED.format(statement)]
        done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    for statement in STATEMENTS.values():
        measure(statement)  # warm the page cache and write the byte code
    rows = [{name: measure(statement) for name, statement in STATEMENTS.items()} for _ in range(repetitions)]
    ratios = {name: [row[name] / row[BASE] for row in rows] for name in STATEMENTS}

    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "import_time.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["import", "repetition", "seconds", "ratio"])
        for name in STATEMENTS:
            for number, row in enumerate(rows):
                writer.writerow([name, number, f"{row[name]:.4f}", f"{ratios[name][number]:.4f}"])
    redraw("import_time")
    for name, found in ratios.items():
        seconds = statistics.median(row[name] for row in rows)
        print(f"{name:24} ratio {statistics.median(found):5.2f}   {seconds:.2f} s")


if __name__ == "__main__":
    main()

"""Measures the effect of chaos on learning: the validator's loss after equal numbers of applied windows.

A window counts as applied if its published set holds an update; chaos leaves some sets empty. Losses are on random
pages, which differ between windows; that alone changes them by one or two percent. Means over three measurements are
also printed. Losses of the calm run are interpolated to the chaos run's numbers of windows.

    python scripts/benchmarks/chaos.py                        # runs both networks: 20 minutes on 2 cores
    python scripts/benchmarks/chaos.py --calm DIR --chaos DIR # compares two existing runs

Writes ``docs/benchmarks/chaos.csv`` and ``chaos.png``, and prints the greatest difference. The limit is 5 % for single
measurements.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pictures import redraw

from tplr.telemetry import read_events
from tplr.watch.view import NodeView

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
NETWORK = ("--miners", "4", "--windows", "50", "--window-seconds", "12")
LIMIT = 0.05


def run_network(folder: Path, *, chaos: bool) -> Path:
    """Run a localnet in ``folder``. Raises CalledProcessError if an outcome failed."""
    command = [sys.executable, "-m", "tplr.cli", "localnet", *NETWORK, "--run-dir", str(folder)]
    subprocess.run([*command, "--chaos"] if chaos else command, check=True)
    return folder


def curve(run: Path) -> dict[int, float]:
    """Return the validator's loss on held-out pages by the number of windows applied before the measurement."""
    view = NodeView("validator", "validator")
    events, _ = read_events(run / "events" / "validator.jsonl")
    for event in events:
        view.update(event)
    filled = sorted(window for window, one in view.applied.items() if one.included)
    return {sum(other < window for other in filled): loss for window, loss in sorted(view.held_out_loss.items())}


def smooth(points: Mapping[int, float]) -> dict[int, float]:
    """Return the mean of each loss and its two neighbours, without the first and last loss."""
    losses = np.convolve(list(points.values()), np.full(3, 1 / 3), mode="valid")
    return dict(zip(list(points)[1:-1], losses.tolist(), strict=True))


def differences(calm: Mapping[int, float], chaos: Mapping[int, float]) -> dict[int, float]:
    """Return the relative difference of chaos from the calm curve, at the numbers of windows that both runs reached."""
    points = [applied for applied in chaos if min(calm) <= applied <= max(calm)]
    expected = np.interp(points, list(calm), list(calm.values()))
    return {applied: float(chaos[applied] / loss - 1) for applied, loss in zip(points, expected, strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calm", type=Path, metavar="DIR", help="folder of an existing run")
    parser.add_argument("--chaos", type=Path, metavar="DIR", help="folder of an existing run with --chaos")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        calm = curve(args.calm or run_network(Path(scratch, "calm"), chaos=False))
        chaos = curve(args.chaos or run_network(Path(scratch, "chaos"), chaos=True))
    with (FOLDER / "chaos.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "windows_applied", "loss"])
        for name, points in (("calm", calm), ("chaos", chaos)):
            writer.writerows([name, applied, f"{loss:.5f}"] for applied, loss in points.items())
    redraw("chaos")
    single = differences(calm, chaos)
    for name, found in (("single", single), ("of three", differences(smooth(calm), smooth(chaos)))):
        where = max(found, key=lambda applied: abs(found[applied]))
        mean = float(np.mean(list(found.values())))
        print(f"{name}: mean {mean:+.2%}, greatest {found[where]:+.2%} after {where} of {max(found)} windows")
    print(f"limit for single measurements: {LIMIT:.0%}")
    return 0 if max(map(abs, single.values())) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())

"""Simulates a network of the size of a subnet, and writes its windows as CSV, with a summary and a picture.

    python scripts/simulate_network.py --size 70B --overlap --windows 1000 --out FOLDER

256 uids and 20 validators over 1,000 windows take a few minutes on one core. The same arguments write the same bytes.
``--set`` changes a constant of the run, ``--assume`` an assumption about links, stores and participants
(``tplr/scale/participants.py`` states all of them).
"""

import argparse
import csv
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from tplr.planner.traffic import DOLLARS_PER_CLASS_B
from tplr.scale.network import Design, Network, WindowResult
from tplr.scale.participants import Assumptions, Participants
from tplr.scale.sizes import BLOCK_SECONDS, SIZES, run_constants, workload

DAY = 86_400.0
PROGRESS = 50  # windows between two lines of progress
STATE_BYTES, CHECKPOINT_BYTES = 16, 4  # per parameter: a SparseLoCo miner's saved state, and a newcomer's download


def simulate(args: argparse.Namespace) -> list[WindowResult]:
    """Return all windows of a simulation; prints lines of progress."""
    load, hparams = workload(args.size), run_constants(args.size, **_values(args.set))
    assumed = Assumptions(**_values(args.assume))
    people = Participants.draw(assumed, uids=args.uids, validators=args.validators, seed=args.seed)
    design = Design(
        hparams=hparams,
        update_bytes=load.update_bytes,
        block_seconds=BLOCK_SECONDS,
        overlap=args.overlap,
        fresh=args.fresh,
        checkpoint_uploads=args.checkpoint_uploads,
        state_bytes=STATE_BYTES * load.parameters,
        checkpoint_bytes=CHECKPOINT_BYTES * load.parameters,
    )
    network, began, cpu = Network(design, assumed, people, args.seed), time.monotonic(), time.process_time()
    found: list[WindowResult] = []
    for result in network.run(args.windows):
        found.append(result)
        if len(found) % PROGRESS == 0 or len(found) == args.windows:
            seconds, busy = time.monotonic() - began, time.process_time() - cpu
            print(f"{len(found):5} of {args.windows} windows, {seconds:.0f} s, {busy:.0f} s of one core", flush=True)
    return found


def summary(args: argparse.Namespace, found: Sequence[WindowResult]) -> dict[str, Any]:
    """Return the figures of a simulation over all windows."""
    window_seconds = run_constants(args.size, **_values(args.set)).blocks_per_window * BLOCK_SECONDS

    def mean(name: str) -> float:
        values = [getattr(one, name) for one in found]
        return sum(values) / len(values)

    decided = sorted(one.decided for one in found)
    windows = DAY / window_seconds
    return {
        "size": args.size,
        "overlap": args.overlap,
        "fresh": args.fresh,
        "uids": args.uids,
        "validators": args.validators,
        "windows": len(found),
        "seed": args.seed,
        "set": _values(args.set),
        "assume": _values(args.assume),
        "utilisation of the median miner": round(mean("utilisation"), 4),
        "utilisation of the worst tenth": round(mean("utilisation_low"), 4),
        "windows that only measure": sum(not one.listed for one in found),
        "windows with every listed update included": round(mean("all_included"), 4),
        "undecided windows": sum(math.isinf(one) for one in decided),
        "decided, seconds after the end: median, 95 %": [
            round(decided[int(q * (len(decided) - 1))]) for q in (0.5, 0.95)
        ],
        "gathered, seconds: median miner, 95 %": [round(mean("gathered")), round(mean("gathered_late"))],
        "miners that applied before the decision": round(mean("uninformed"), 2),
        "updates that were late or missing, of a window": round(mean("missed"), 2),
        "miners away": round(mean("away"), 2),
        "probation": round(mean("probation"), 1),
        "median validator's link busy, share of the window": round(mean("validator_link") / window_seconds, 3),
        "reads of a listed bucket a window": round(mean("class_b")),
        "dollars a day for them": round(mean("class_b") * windows * DOLLARS_PER_CLASS_B, 3),
        "reads of the busiest elector's bucket a window, for decisions": round(mean("elector_b")),
    }


def draw(path: Path, args: argparse.Namespace, found: Sequence[WindowResult]) -> None:
    """Draw utilisation, times of a window, and counted updates, over the windows."""
    numbers = [one.window for one in found]
    figure, (used, times, counts) = plt.subplots(3, 1, figsize=(10, 8), sharex=True, layout="constrained")
    used.plot(numbers, [100 * one.utilisation for one in found], color="#2a7f3f", label="median miner")
    used.plot(numbers, [100 * one.utilisation_low for one in found], color="#9fc9a8", lw=0.8, label="worst tenth")
    used.axhline(99, color="#999999", ls=":", lw=1)
    used.set_ylabel("devices train, % of the window")
    for name, colour in {"gathered": "#1f5fa8", "gathered_late": "#9db8d9", "decided": "#c8772b"}.items():
        label = {"gathered": "median miner has all", "gathered_late": "95 % have all", "decided": "decided"}[name]
        times.plot(numbers, [getattr(one, name) for one in found], color=colour, lw=0.9, label=label)
    times.set_ylabel("seconds after the window's end")
    counts.plot(numbers, [one.included for one in found], color="#2a7f3f", label="included")
    counts.plot(numbers, [one.missed for one in found], color="#c0392b", lw=0.8, label="late or missing, of all")
    counts.plot(numbers, [one.away for one in found], color="#999999", lw=0.8, label="away")
    counts.set_ylabel("miners")
    counts.set_xlabel("window")
    mode = "overlap" if args.overlap else "no overlap"
    used.set_title(f"{args.size}, {args.uids} uids, {args.validators} validators, {mode} (simulated)", loc="left")
    for axes in (used, times, counts):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def write(args: argparse.Namespace, found: Sequence[WindowResult]) -> dict[str, Any]:
    """Write windows.csv, summary.json and windows.png into the folder of ``args``."""
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "windows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [one.name for one in fields(WindowResult)], lineterminator="\n")
        writer.writeheader()
        for one in found:
            writer.writerow(
                {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(one).items()}
            )
    figures = summary(args, found)
    (args.out / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    draw(args.out / "windows.png", args, found)
    return figures


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of a simulation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="70B")
    parser.add_argument("--overlap", action="store_true", help="gather while the next window trains")
    parser.add_argument("--fresh", action="store_true", help="begin with nobody known: the first windows only measure")
    parser.add_argument("--uids", type=int, default=256)
    parser.add_argument("--validators", type=int, default=20, help="of the uids")
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint-uploads", type=int, default=0, help="parts of a miner's checkpoint sent at once")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="constants of the run")
    parser.add_argument("--assume", nargs="*", default=[], metavar="NAME=VALUE", help="assumptions")
    parser.add_argument("--out", type=Path, default=Path("simulated"))
    return parser.parse_args(arguments)


def _values(pairs: Sequence[str]) -> dict[str, Any]:
    return {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in pairs)}


def main() -> None:
    args = parse()
    for name, value in write(args, simulate(args)).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()

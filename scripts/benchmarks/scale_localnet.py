"""Predicts the waiting times of nodes in a localnet with the simulated network, and compares them with real ones.

    tplr localnet --scheme demo --small --share-imports --miners 8 --validators 3 --windows 8 --window-seconds 40 \\
        --run-dir FIRST
    python scripts/benchmarks/scale_localnet.py FIRST --predict prediction.json
    (the same command with --run-dir SECOND)
    python scripts/benchmarks/scale_localnet.py SECOND --compare prediction.json

The inputs of the simulation are constants and work: the run's constants, the medians of training, packing, applying and
of the remaining phases, the processor time of a request (node and store) and of a validator's measurements, and the
number of shared processors. It predicts a miner's waiting time for the updates and the decision, and for the window's
end, and the time from which the decision can be read; also in windows that only measure. ``--predict`` reads none of
the predicted values, so that a prediction can be recorded before they are known. Without options it does both,
and prints the result.

``--predict`` on the folder of one run predicts another run with ``--windows``, ``--window-seconds``, ``--set``.
"""

import argparse
import csv
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Any

from tplr.hparams import load_hparams
from tplr.localnet.plan import BLOCK_SECONDS
from tplr.scale.network import Design, Network, WindowResult
from tplr.scale.participants import Assumptions, Participants

GIVEN = ("training", "waiting_for_pages", "packing", "uploading", "applying", "saving", "other")
FIRST = 2  # first windows of a run to skip: nodes are still starting
SEEDS = 20  # simulated runs; the medians are over these
LATENCY = 1e-3  # seconds, within one machine

UPDATES, END, DECIDED = "waiting for updates and decision", "waiting for the window's end", "decision can be read after"
ORDINARY, MEASURING = "ordinary", "measuring only"


@dataclass(frozen=True)
class Gathered:
    """Times of a miner's gather of ``window`` and of its other phases, from the event ``window_time``."""

    window: int
    seconds: dict[str, float]
    kind: str


def events_of(path: Path) -> list[dict[str, Any]]:
    """Return all events of a node."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def gathers(folder: Path, before: float = math.inf) -> list[Gathered]:
    """Return each miner's windows, without the first ones. A window's time contains the gather of the previous window.

    Args:
        before: only windows before this one are returned.
    """
    rows = []
    for path in sorted((folder / "events").glob("miner-*.jsonl")):
        events = events_of(path)
        sets = {one["window"]: one["included"] for one in events if one["event"] == "applied"}
        for one in [one for one in events if one["event"] == "window_time"][FIRST:]:
            window = one["window"] - 1
            if window >= before:
                continue
            seconds = {name: value for name, value in one.items() if isinstance(value, float)}
            rows.append(Gathered(window, seconds, ORDINARY if sets.get(window) else MEASURING))
    return rows


def work(folder: Path) -> dict[str, float]:
    """Return the median seconds of the phases in which a miner does not wait."""
    rows = gathers(folder)
    return {name: median(row.seconds.get(name, 0.0) for row in rows) for name in GIVEN}


def processor_seconds(folder: Path) -> dict[str, float]:
    """Return the processor time of each kind of process per window: the mean over the second half of the run."""
    with (folder / "usage.csv").open() as file:
        at = {(row["name"], int(row["windows"])): float(row["cpu"]) for row in csv.DictReader(file)}
    windows = sorted({window for _, window in at})
    last, middle = windows[-1], windows[len(windows) // 2]
    kinds = defaultdict(list)
    for name in {name for name, _ in at}:
        kinds[name.split("-")[0]].append((at[name, last] - at[name, middle]) / (last - middle))
    return {kind: sum(values) / len(values) for kind, values in kinds.items()}


def request_work(folder: Path) -> float:
    """Return the processor seconds per request: of the aggregator, which does little else, and of the store."""
    cpu = processor_seconds(folder)
    pulses = [one for one in events_of(folder / "events" / "aggregator.jsonl") if one["event"] == "pulse"]
    half = pulses[len(pulses) // 2 :]
    asked = median(sum(one["storage_requests"].values()) for one in half)
    since, until = half[0]["time"], half[-1]["time"]
    served = sum(since <= one["time"] < until for one in requests(folder)) / (len(half) - 1)
    return cpu["aggregator"] / asked + cpu["storage"] / served


def requests(folder: Path) -> Iterable[dict[str, Any]]:
    """Yield the requests of the store's log."""
    with (folder / "logs" / "requests.jsonl").open() as file:
        yield from map(json.loads, file)


def waiting(folder: Path, kind: str, before: float) -> dict[str, float]:
    """Return the median seconds of the phases in which nodes wait for others, in windows of one kind; empty if none."""
    rows = [row for row in gathers(folder, before) if row.kind == kind]
    if not rows:
        return {}
    decided = decisions(folder, {row.window for row in rows})
    return {
        UPDATES: median(row.seconds["waiting_for_bound"] + row.seconds["gathering"] for row in rows),
        END: median(row.seconds["waiting_for_end"] for row in rows),
        DECIDED: median(decided),
    }


def decisions(folder: Path, windows: Iterable[int]) -> list[float]:
    """Return, for each window, the seconds from its end until more than half of the electors had published
    decisions."""
    ends: dict[int, list[float]] = defaultdict(list)
    for path in sorted((folder / "events").glob("miner-*.jsonl")):
        for one in events_of(path):
            if one["event"] == "pulse":
                ends[one["window"] - 1].append(one["time"] - one["block_age"])
    published: dict[int, dict[str, float]] = defaultdict(dict)
    for one in requests(folder):
        found = re.match(r"/([^/]+)/aggregator-(\d+)-v[^/]*\.json$", one["path"])
        if found and one["method"] == "PUT" and one["status"] == HTTPStatus.OK:
            published[int(found[2])].setdefault(found[1], one["time"] + one["seconds"])
    half = len(list((folder / "events").glob("validator*.jsonl"))) // 2
    return [
        sorted(published[window].values())[half] - median(ends[window])
        for window in windows
        if len(published[window]) > half and ends[window]
    ]


def simulate(
    given: dict[str, float], folder: Path, *, windows: int, window_seconds: float | None, changes: dict[str, Any]
) -> list[WindowResult]:
    """Return the windows of ``SEEDS`` simulated runs, without the first windows of each."""
    names = [path.stem for path in (folder / "events").glob("*.jsonl")]
    miners, validators = (sum(name.startswith(role) for name in names) for role in ("miner", "validator"))
    hparams = load_hparams(folder / "hparams.json").model_copy(update=changes)
    if window_seconds:
        hparams = hparams.model_copy(update={"blocks_per_window": round(window_seconds / BLOCK_SECONDS)})
    assumed = Assumptions(
        down=1e9, up=1e9, validator_down=1e9, validator_up=1e9, link_spread=0.0, hour_spread=0.0, latency=LATENCY,
        loss=1e-9, request=given["request work"], tail=0.0, cores=given["processors"],
        request_work=given["request work"], measuring_work=given["measuring work"], outages=(0.0, 1.0),
        regional=(0.0, 1.0), crash=0.0, churn=0.0, dead=0.0, silent=0.0, gpu_spread=0.0, training=given["training"],
        pack=given["packing"], apply=given["applying"], save=given["saving"], bad=0.0,
    )  # fmt: skip
    design = Design(
        hparams=hparams,
        update_bytes=int(given["update bytes"]),
        block_seconds=BLOCK_SECONDS,
        overlap=False,
        fresh=True,
    )
    found = []
    for seed in range(SEEDS):
        people = Participants.draw(assumed, uids=miners + validators, validators=validators, seed=seed)
        found += list(Network(design, assumed, people, seed).run(windows))[FIRST - 1 :]
    return found


def predict(
    folder: Path, *, windows: int | None, window_seconds: float | None, changes: dict[str, Any], cores: int
) -> dict[str, Any]:
    """Return the inputs and the phases of the simulated network.

    The arguments are those of the predicted run; None: as in ``folder``.
    """
    cpu, phases = processor_seconds(folder), work(folder)
    updates = [one for one in events_of(folder / "events" / "miner-1.jsonl") if one["event"] == "uploaded"]
    given = phases | {
        "processors": float(cores),
        "request work": request_work(folder),
        "measuring work": cpu["validator"] - cpu["aggregator"],
        "update bytes": updates[0]["bytes"],
    }
    results = simulate(given, folder, windows=windows or len(updates), window_seconds=window_seconds, changes=changes)
    length = window_seconds or load_hparams(folder / "hparams.json").blocks_per_window * BLOCK_SECONDS
    predicted = {}
    for kind in (ORDINARY, MEASURING):
        mine = [one for one in results if bool(one.listed) == (kind == ORDINARY)]
        if mine:
            waits = median(one.gathered - one.uploaded + one.waited for one in mine)
            predicted[kind] = {
                UPDATES: waits,
                END: length - sum(phases.values()) - waits,
                DECIDED: median(one.decided for one in mine),
            }
    return {"given": given, "window seconds": length, "predicted": predicted}


def table(prediction: dict[str, Any], folder: Path, before: float) -> str:
    """Return predicted and measured phases, as lines of a Markdown table."""
    lines = ["| windows | phase | measured, s | predicted, s | |", "|---|---|---:|---:|---:|"]
    for kind, phases in prediction["predicted"].items():
        for name, real in waiting(folder, kind, before).items():
            lines.append(f"| {kind} | {name} | {real:.2f} | {phases[name]:.2f} | {phases[name] / real - 1:+.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--predict", type=Path, metavar="FILE", help="write the prediction, and look at no waiting")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="with what was predicted before")
    parser.add_argument("--windows", type=int, metavar="N", help="of the predicted run, if it is another one")
    parser.add_argument("--window-seconds", type=float, metavar="S", help="the same")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="constants of the predicted run")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="processors that all nodes share")
    parser.add_argument("--before", type=int, default=math.inf, metavar="W", help="compare only earlier windows")
    args = parser.parse_args()
    if args.compare:
        print(table(json.loads(args.compare.read_text()), args.folder, args.before))
        return
    changes = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in args.set)}
    prediction = predict(
        args.folder, windows=args.windows, window_seconds=args.window_seconds, changes=changes, cores=args.cores
    )
    text = json.dumps(prediction, indent=2)
    if args.predict:
        args.predict.write_text(text + "\n")
        return
    print(text)
    print(table(prediction, args.folder, args.before))


if __name__ == "__main__":
    main()

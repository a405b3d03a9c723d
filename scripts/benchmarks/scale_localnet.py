"""Predicts, by the simulated network, how long miners of a real one wait, and compares: a localnet of some nodes.

    tplr localnet --scheme demo --miners 8 --validators 3 --windows 8 --window-seconds 30 --run-dir FOLDER
    python scripts/benchmarks/scale_localnet.py FOLDER --predict prediction.json
    python scripts/benchmarks/scale_localnet.py FOLDER --compare prediction.json

The simulation gets what it does not predict: the run's constants, the medians of training, packing, applying and of the
remaining work, and the time of a request from the server's log (``request_seconds``). It predicts the phases in which a
miner waits for others: for the updates and the decision, and for the window's end. ``--predict`` reads nothing of these
phases, so that a prediction can be written down before anybody has seen them. Without options: both, printed.

``--predict`` on the folder of a first run, with ``--window-seconds``, predicts a second one before it starts.
"""

import argparse
import json
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Any

from tplr.hparams import load_hparams
from tplr.localnet.plan import BLOCK_SECONDS
from tplr.scale.network import Design, Network
from tplr.scale.participants import Assumptions, Participants

GIVEN = ("training", "waiting_for_pages", "packing", "uploading", "applying", "saving", "other")
IN_TIME = 12.0  # seconds: validators read an update again two windows later
UPDATES, END = "waiting for updates and decision", "waiting_for_end"
FIRST = 2  # windows of a run that are not ordinary: before them a node starts


def window_times(folder: Path) -> list[dict[str, float]]:
    """Where the time of each miner's ordinary windows went."""
    rows = []
    for path in sorted((folder / "events").glob("miner-*.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        rows += [one for one in events if one["event"] == "window_time"][FIRST:]
    return rows


def work(folder: Path) -> dict[str, float]:
    """Median seconds of the phases in which a miner waits for nobody."""
    rows = window_times(folder)
    return {name: median(row.get(name, 0.0) for row in rows) for name in GIVEN}


def waiting(folder: Path) -> dict[str, float]:
    """Median seconds of the phases in which a miner waits for others."""
    rows = window_times(folder)
    both = median(row.get("waiting_for_bound", 0.0) + row.get("gathering", 0.0) for row in rows)
    return {UPDATES: both, END: median(row.get(END, 0.0) for row in rows)}


def request_seconds(folder: Path) -> float:
    """Median seconds of a request as nodes see it: a third of the time from the HEAD of an update to its GET's end.

    Between them is the HEAD of the commit. The server's log does not say who asked: medians over all readers of an
    update are compared, of those that asked in time.
    """
    heads: dict[str, list[float]] = {}
    gets: dict[str, list[float]] = {}
    for line in (folder / "logs" / "requests.jsonl").read_text().splitlines():
        one = json.loads(line)
        if "/gradient-" not in one["path"] or one["status"] != HTTPStatus.OK or one["method"] == "PUT":
            continue
        if one["method"] == "HEAD":
            heads.setdefault(one["path"], []).append(one["time"])
        else:
            gets.setdefault(one["path"], []).append(one["time"] + one["seconds"])
    chains = []
    for path in sorted(heads.keys() & gets.keys()):
        until = min(heads[path]) + IN_TIME
        looked, fetched = ([at for at in times[path] if at < until] for times in (heads, gets))
        if looked and fetched:
            chains.append(median(fetched) - median(looked))
    return median(chains) / 3


def predict(folder: Path, *, window_seconds: float | None, seed: int) -> dict[str, Any]:
    """What is given, and the phases of the simulated network.

    Args:
        window_seconds: of the predicted run; None: of the one in ``folder``.
    """
    given, request = work(folder), request_seconds(folder)
    names = [path.stem for path in (folder / "events").glob("*.jsonl")]
    miners, validators = (sum(name.startswith(role) for name in names) for role in ("miner", "validator"))
    hparams = load_hparams(folder / "hparams.json")
    if window_seconds:
        hparams = hparams.model_copy(update={"blocks_per_window": round(window_seconds / BLOCK_SECONDS)})
    events = [json.loads(line) for line in (folder / "events" / "miner-1.jsonl").read_text().splitlines()]
    size = next(one["bytes"] for one in events if one["event"] == "uploaded")
    assumed = Assumptions(
        down=1e9, up=1e9, validator_down=1e9, validator_up=1e9, link_spread=0.0, hour_spread=0.0, latency=1e-3,
        loss=1e-9, request=request - 1e-3, request_spread=0.0, tail=0.0, outages=(0.0, 1.0), regional=(0.0, 1.0),
        crash=0.0, churn=0.0, dead=0.0, silent=0.0, gpu_spread=0.0, training=given["training"],
        pack=given["packing"], apply=given["applying"], save=given["saving"], bad=0.0,
    )  # fmt: skip
    uids = miners + validators
    people = Participants.draw(assumed, uids=uids, validators=validators, seed=seed)
    design = Design(hparams=hparams, update_bytes=size, block_seconds=BLOCK_SECONDS, overlap=False)
    results = list(Network(design, assumed, people, seed).run(50))
    waits = median(one.gathered - one.uploaded + one.waited for one in results)
    return {
        "given": given | {"request": request, "window": design.window_seconds, "update_bytes": size, "miners": miners},
        "predicted": {UPDATES: waits, END: design.window_seconds - sum(given.values()) - waits},
        "decided, after the window's end": median(one.decided for one in results),
    }


def table(prediction: dict[str, Any], folder: Path) -> str:
    """Predicted and measured phases, as lines of a Markdown table."""
    lines = ["| phase of a miner | measured, s | predicted, s | |", "|---|---:|---:|---:|"]
    for name, real in waiting(folder).items():
        guess = prediction["predicted"][name]
        lines.append(f"| {name.replace('_', ' ')} | {real:.2f} | {guess:.2f} | {guess / real - 1:+.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--predict", type=Path, metavar="FILE", help="write the prediction, and look at no waiting")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="with what was predicted before")
    parser.add_argument("--window-seconds", type=float, metavar="S", help="of the predicted run, if it is another one")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.compare:
        print(table(json.loads(args.compare.read_text()), args.folder))
        return
    prediction = predict(args.folder, window_seconds=args.window_seconds, seed=args.seed)
    text = json.dumps(prediction, indent=2)
    if args.predict:
        args.predict.write_text(text + "\n")
        return
    print(text)
    print(table(prediction, args.folder))


if __name__ == "__main__":
    main()

"""Compares the simulated network with a real one: a localnet of some miners and validators.

    tplr localnet --scheme demo --miners 8 --validators 3 --windows 8 --window-seconds 30 --run-dir FOLDER
    python scripts/benchmarks/scale_localnet.py FOLDER

The simulation gets what it does not predict: the run's constants, the medians of training, packing, applying and of the
remaining work, and the time of a request from the server's log (``request_seconds``). It predicts the phases in which a
miner waits for others: for the updates and the decision, and for the window's end. Prints both.
"""

import argparse
import json
from http import HTTPStatus
from pathlib import Path
from statistics import median

from tplr.hparams import load_hparams
from tplr.localnet.plan import BLOCK_SECONDS
from tplr.scale.network import Design, Network
from tplr.scale.participants import Assumptions, Participants

GIVEN = ("training", "waiting_for_pages", "packing", "uploading", "applying", "saving", "other")
IN_TIME = 12.0  # seconds: validators read an update again two windows later
FIRST = 2  # windows of a run that are not ordinary: before them a node starts


def measured(folder: Path) -> dict[str, float]:
    """Median seconds of each phase over miners and ordinary windows, and of the whole."""
    rows = []
    for path in sorted((folder / "events").glob("miner-*.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        rows += [one for one in events if one["event"] == "window_time"][FIRST:]
    names = (*GIVEN, "waiting_for_bound", "gathering", "waiting_for_end", "seconds")
    found = {name: median(row.get(name, 0.0) for row in rows) for name in names}
    both = median(row.get("waiting_for_bound", 0.0) + row.get("gathering", 0.0) for row in rows)
    return found | {"waiting for updates and decision": both, "windows": len(rows)}


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


def predicted(folder: Path, given: dict[str, float], update_bytes: int, *, seed: int) -> dict[str, float]:
    """The same phases of the simulated network."""
    request = request_seconds(folder)
    names = [path.stem for path in (folder / "events").glob("*.jsonl")]
    miners, validators = (sum(name.startswith(role) for name in names) for role in ("miner", "validator"))
    hparams = load_hparams(folder / "hparams.json")
    assumed = Assumptions(
        down=1e9, up=1e9, validator_down=1e9, validator_up=1e9, link_spread=0.0, hour_spread=0.0, latency=1e-3,
        loss=1e-9, request=request - 1e-3, request_spread=0.0, tail=0.0, outages=(0.0, 1.0), regional=(0.0, 1.0),
        crash=0.0, churn=0.0, dead=0.0, silent=0.0, gpu_spread=0.0, training=given["training"],
        pack=given["packing"], apply=given["applying"], save=given["saving"], bad=0.0,
    )  # fmt: skip
    uids = miners + validators
    people = Participants.draw(assumed, uids=uids, validators=validators, seed=seed)
    design = Design(hparams=hparams, update_bytes=update_bytes, block_seconds=BLOCK_SECONDS, overlap=False)
    results = list(Network(design, assumed, people, seed).run(50))
    waits = median(one.gathered - one.uploaded + one.waited for one in results)
    work = sum(given[name] for name in GIVEN)
    return {
        "waiting for updates and decision": waits,
        "waiting_for_end": design.window_seconds - work - waits,
        "request": request,
        "decided, after the window's end": median(one.decided for one in results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    real = measured(args.folder)
    events = [json.loads(line) for line in (args.folder / "events" / "miner-1.jsonl").read_text().splitlines()]
    size = next(one["bytes"] for one in events if one["event"] == "uploaded")
    simulated = predicted(args.folder, real, size, seed=args.seed)
    print(f"{real['windows']:.0f} windows of miners; seconds")
    for name, value in real.items():
        if name != "windows":
            other = simulated.get(name)
            text = f"{other:8.2f} {other / value - 1:+7.1%}" if other is not None else "   given"
            print(f"{name:34} {value:8.2f} {text}")
    print(
        f"decided, after the window's end: simulated {simulated['decided, after the window' + chr(39) + 's end']:.2f}"
    )


if __name__ == "__main__":
    main()

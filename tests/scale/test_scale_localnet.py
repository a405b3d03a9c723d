"""``scripts/benchmarks/scale_localnet.py`` reads a run's folder, and its prediction reads no waiting times."""

import importlib.util
import json
import math
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tplr.localnet.plan import scheme_constants
from tplr.scale.sizes import run_constants

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmarks" / "scale_localnet.py"
LENGTH, WINDOWS = 40.0, 6
MINERS, VALIDATORS = 4, 3


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale_localnet", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def a_run(folder: Path, *, waits: float) -> Path:
    """The files of a run: windows 0 to 5; sets of the windows before 3 are empty."""
    for name in [f"miner-{uid}" for uid in range(1, MINERS + 1)] + ["validator", "validator-2", "validator-3"]:
        events: list[dict[str, Any]] = []
        for window in range(WINDOWS):
            pulse = {"event": "pulse", "window": window, "time": LENGTH * window + 0.5, "block_age": 0.5}
            phases = {"training": 2.0, "gathering": waits, "waiting_for_bound": 1.0, "waiting_for_end": 30.0}
            events += [
                pulse,
                {"event": "applied", "window": window, "included": [1] if window >= 3 else []},
                {"event": "uploaded", "window": window, "bytes": 10_000},
                {"event": "window_time", "window": window, **phases},
            ]
        write(folder / "events" / f"{name}.jsonl", events)
    answers = {"storage_requests": {"ok": 30, "ObjectNotFound": 20}}
    pulses = [{"event": "pulse", "window": window, "time": LENGTH * window, **answers} for window in range(WINDOWS)]
    write(folder / "events" / "aggregator.jsonl", pulses)
    requests = [
        {"time": LENGTH * window + 0.1 * number, "seconds": 0.1, "method": "GET", "path": "/b/any", "status": 200}
        for window in range(WINDOWS)
        for number in range(200)
    ]
    for window in range(WINDOWS - 1):  # the three electors publish 5, 6 and 9 s after the window's end
        requests += [
            {
                "time": LENGTH * (window + 1) + after - 0.1,
                "seconds": 0.1,
                "method": "PUT",
                "path": f"/b{after}/aggregator-{window}-v1.json",
                "status": 200,
            }
            for after in (9, 5, 6)
        ]
    write(folder / "logs" / "requests.jsonl", sorted(requests, key=lambda one: one["time"]))
    rows = ["windows,name,rss,pss,uss,cpu"]
    seconds = {"aggregator": 0.1, "storage": 0.4, "validator": 0.6, "validator-2": 0.8, "miner-1": 9.0}
    for window in (1, 2, 3, 4):
        rows += [f"{window},{name},1,1,1,{window * cpu}" for name, cpu in seconds.items()]
    (folder / "usage.csv").write_text("\n".join(rows) + "\n")
    raw = run_constants("1B").model_dump(mode="json")
    raw |= {
        name: value for name, value in scheme_constants(small=True).items() if name in raw and name.endswith("seconds")
    }
    raw |= {"blocks_per_window": int(LENGTH / 0.5), "probation_windows": 0, "max_topk_peers": 8}
    (folder / "hparams.json").write_text(json.dumps(raw))
    return folder


def test_work_is_that_of_a_request_and_of_a_validators_measures(tmp_path: Path, script: ModuleType) -> None:
    folder = a_run(tmp_path, waits=3.0)
    # 50 requests of the aggregator in a window, some 203 of all nodes.
    assert script.request_work(folder) == pytest.approx(0.1 / 50 + 0.4 / 203, rel=0.01)
    assert script.processor_seconds(folder)["validator"] == pytest.approx(0.7)
    assert script.work(folder)["training"] == 2.0


def test_windows_that_only_measure_are_told_from_others(tmp_path: Path, script: ModuleType) -> None:
    folder = a_run(tmp_path, waits=3.0)
    kinds = {one.window: one.kind for one in script.gathers(folder)}
    assert kinds == {1: script.MEASURING, 2: script.MEASURING, 3: script.ORDINARY, 4: script.ORDINARY}
    assert {one.window for one in script.gathers(folder, before=3)} == {1, 2}
    # Decisions can be read when the second of three electors has published.
    assert script.waiting(folder, script.ORDINARY, math.inf) == {
        script.UPDATES: pytest.approx(4.0),
        script.END: pytest.approx(30.0),
        script.DECIDED: pytest.approx(6.0),
    }


def test_a_prediction_reads_nothing_of_the_waiting(tmp_path: Path, script: ModuleType) -> None:
    found = [
        script.predict(a_run(tmp_path / str(waits), waits=waits), windows=3, window_seconds=None, changes={}, cores=2)
        for waits in (3.0, 13.0)
    ]
    assert found[0] == found[1]
    assert found[0]["predicted"].keys() == {script.ORDINARY}
    assert script.table(found[0], tmp_path / "3.0", math.inf).count("\n") == 4

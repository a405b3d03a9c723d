"""Metrics over HTTP: the effect of each event on them, and the boards and rules that use them."""

import importlib.util
import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
from guides import from_guide
from prometheus_client.parser import text_string_to_metric_families

from tplr.errors import ConfigError
from tplr.schemas import Reason
from tplr.scoring import penalties
from tplr.storage.s3_errors import _BY_CODE, _BY_STATUS
from tplr.telemetry import PrometheusListener, Telemetry
from tplr.telemetry.events import Cause
from tplr.telemetry.metrics import METRICS

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docker" / "prometheus"
GPU = {"used_bytes": 1e9, "total_bytes": 8e10, "busy": 0.9, "celsius": 60.0, "watts": 300.0}
# One event of each kind that a metric reads.
EVENTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "miner": [
        ("started", {"version": "2026.1", "window": 7}),
        ("trained", {"window": 7, "loss": 5.5, "batches": 4, "of_batches": 6, "skipped": 1, "tokens": 4096}),
        ("uploaded", {"window": 7, "bytes": 900, "parameters": 10_000}),
        (
            "window_time",
            {"window": 7, "seconds": 8.0, "training": 6.0, "other": 2.0, "tokens_per_second": 700.0}
            | {"model_flops_utilisation": 0.4, "memory": {"weights": 40_000, "gradients": None}},
        ),
        ("missed", {"window": 8, "cause": "data", "reason": "no pages"}),
        ("missed", {"window": 9, "cause": "data", "reason": "no pages"}),
        ("applied", {"window": 7, "included": [1, 2], "skipped": {"3": "missing"}, "bytes": 1800, "seconds": 0.5}),
        ("restored", {"window": 5, "peer": 0}),
        ("rolled_back", {"window": 6}),
        ("outdated", {"window": 6, "text": "upgrade it", "package": "0.1.0", "network_package": "0.2.0"}),
    ],
    "validator": [
        ("started", {"version": "2026.1", "window": 7}),
        ("baseline", {"window": 7, "held_out_loss": 5.0}),
        ("scores", {"window": 7, "scores": {"1": 0.5, "2": 0.1}, "struck": {"2": ["behind"]}, "faults": []}),
        ("scores", {"window": 8, "scores": {"1": 0.6}, "struck": {}, "faults": []}),
        ("weights", {"block": 70, "weights": {"1": 0.8, "2": 0.2}, "on_chain": {}}),
        ("peers", {"first_effective_window": 9, "peers": [1], "reserve": [2], "probation": []}),
        ("aggregated", {"window": 7, "included": [1], "skipped": {}, "bytes": 900, "seconds": 0.1}),
        ("checkpoint", {"window": 7, "bytes": 40_000}),
        ("problem", {"text": "weights not set"}),
        (
            "pulse",
            {"window": 8, "block": 64, "block_age": 2.0, "window_seconds": 96.0, "free_bytes": 5 * 10**11}
            | {"storage_requests": {"ok": 12, "StoreUnavailable": 3}, "gpus": {"0": GPU}},
        ),
    ],
    "evaluator": [
        (
            "evaluation",
            {"window": 7, "nats_per_token": 4.0, "bits_per_byte": 1.6, "tasks": {"arithmetic": {"acc,none": 0.25}}},
        ),
    ],
}


def play(listener: PrometheusListener, role: str) -> None:
    telemetry = Telemetry(role=role, uid=1, listeners=(listener,))
    for event, fields in EVENTS[role]:
        telemetry.emit(event, **fields)


def series(port: int) -> dict[tuple[str, str], float]:
    """Return the served values by name and label value ("" without a label)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_events_become_series() -> None:
    with PrometheusListener(0, address="127.0.0.1") as listener:
        assert not any(name == "tplr_training_loss_nats" for name, _ in series(listener.port))
        play(listener, "miner")
        mine = series(listener.port)
        Telemetry(role="miner", uid=1, listeners=(listener,)).emit("outdated", window=9, text="")
        play(listener, "validator")
        play(listener, "evaluator")
        found = series(listener.port)
    assert mine["tplr_info", "miner"] == 1
    assert mine["tplr_training_loss_nats", ""] == 5.5
    assert mine["tplr_windows_missed_total", "data"] == 2
    assert mine["tplr_training_time_ratio", ""] == 0.75
    assert mine["tplr_gather_results_total", "included"] == 2
    assert mine["tplr_gather_results_total", "missing"] == 1
    assert mine["tplr_phase_seconds_total", "training"] == 6
    assert mine["tplr_memory_bytes", "weights"] == 40_000
    assert ("tplr_memory_bytes", "gradients") not in mine
    assert (mine["tplr_outdated", ""], found["tplr_outdated", ""]) == (1, 0)  # the change was withdrawn
    # A uid that lost its score has no series; counters stay.
    assert found["tplr_score", "1"] == 0.6
    assert ("tplr_score", "2") not in found
    assert found["tplr_strikes_total", "behind"] == 1
    assert found["tplr_storage_requests_total", "StoreUnavailable"] == 3
    assert found["tplr_gpu_utilisation_ratio", "0"] == 0.9
    assert found["tplr_evaluation_bits_per_byte", ""] == 1.6
    assert found["tplr_evaluation_result", "arithmetic acc,none"] == 0.25
    assert found["process_resident_memory_bytes", ""] > 2**20
    # Every metric has been read from the events above, under its own name.
    assert {metric.name for metric in METRICS} <= {name for name, _ in found}


def test_a_value_that_is_no_longer_measured_is_not_shown() -> None:
    idle = {"window": 8, "seconds": 8.0, "training": 0.0, "other": 8.0, "tokens_per_second": None}
    with PrometheusListener(0, address="127.0.0.1") as listener:
        play(listener, "miner")
        Telemetry(role="miner", uid=1, listeners=(listener,)).emit("window_time", **idle)
        found = series(listener.port)
    assert not {"tplr_training_tokens_per_second", "tplr_model_flops_utilisation_ratio"} & {name for name, _ in found}
    assert found["tplr_training_time_ratio", ""] == 0
    assert found["tplr_phase_seconds_total", "training"] == 6  # a counter stays


def test_what_is_counted_is_there_before_it_happens() -> None:
    with PrometheusListener(0, address="127.0.0.1") as listener:
        found = series(listener.port)
    ours = {key: value for key, value in found.items() if key[0].startswith("tplr_")}
    assert set(ours.values()) == {0.0}
    labels = {name: {label for one, label in ours if one == name} for name, _ in ours}
    # All counters; one of them learns its label's values with its first event.
    counters = {metric.name for metric in METRICS if metric.kind == "counter"}
    assert labels.keys() == counters - {"tplr_phase_seconds_total"} | {"tplr_outdated"}
    assert labels["tplr_rollbacks_total"] == {""}
    assert labels["tplr_strikes_total"] == {rule.code for rule in penalties.RULES}
    assert labels["tplr_gather_results_total"] == {"included", *Reason}
    refusals = {kind.__name__ for table in (_BY_CODE, _BY_STATUS) for kind, _ in table.values()}
    assert labels["tplr_storage_requests_total"] == {"ok", *refusals}


def test_metrics_read_documented_events() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert {metric.event for metric in METRICS} <= set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    (causes,) = re.findall(r"^\| `missed` \|.*`cause` \(([^)]*)\)", text, flags=re.MULTILINE)
    assert causes == ", ".join(f"`{cause}`" for cause in get_args(Cause))
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_used_port_is_a_configuration_error() -> None:
    with (
        PrometheusListener(0, address="127.0.0.1") as listener,
        pytest.raises(ConfigError, match=f"--metrics-port {listener.port} on 127.0.0.1: .*give another port"),
    ):
        PrometheusListener(listener.port, address="127.0.0.1")
    for port, address in ((99999, "127.0.0.1"), (0, "a..b")):
        with pytest.raises(ConfigError, match=f"--metrics-port {port} on {address}: .*give another port"):
            PrometheusListener(port, address=address)


# Boards and rules


@pytest.fixture(scope="module")
def boards() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_boards", ROOT / "scripts" / "grafana_boards.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def queries(boards: ModuleType) -> list[str]:
    """All queries, with Grafana's variables replaced."""
    return [
        target["expr"].replace("$instance", ".*")
        for name in boards.BOARDS
        for panel in boards.board(name)["panels"]
        for target in panel["targets"]
    ]


def test_boards_are_those_of_the_script(boards: ModuleType) -> None:
    for name in boards.BOARDS:
        path = boards.FOLDER / f"{name}.json"
        assert path.read_text() == boards.text_of(name), f"{path.name} is out of date: run scripts/grafana_boards.py"
        panels = json.loads(path.read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)


def test_queries_and_rules_ask_for_metrics_that_exist(boards: ModuleType) -> None:
    served = {metric.name for metric in METRICS} | {"tplr_info"}
    asked = set(re.findall(r"\btplr_\w+", " ".join(queries(boards)) + (RULES / "alerts.yml").read_text()))
    assert asked <= served
    assert served - asked <= {
        "tplr_block",
        "tplr_checkpoints_restored_total",
        "tplr_trained_batches_total",
        "tplr_windows_applied_total",
    }


def promtool(*arguments: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool, which Debian has in its package prometheus."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    command = [found, *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd=ROOT)


def test_rules_raise_the_alert_of_each_trouble() -> None:
    assert promtool("check", "config", "--syntax-only", RULES / "prometheus.yml").returncode == 0
    _, *words = from_guide("docs/monitoring.md", "promtool test rules docker/prometheus/alerts_test.yml").words
    ran = promtool(*words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    alerts = re.findall(r"alert: (\w+)", (RULES / "alerts.yml").read_text())
    assert all(f'alertname="{name}"' in (RULES / "alerts_test.yml").read_text() for name in alerts)


def test_names_follow_the_rules_of_prometheus() -> None:
    with PrometheusListener(0, address="127.0.0.1") as listener:
        play(listener, "miner")
        play(listener, "validator")
        with urllib.request.urlopen(f"http://127.0.0.1:{listener.port}/metrics") as response:
            text = response.read().decode()
    ran = promtool("check", "metrics", text=text)
    assert ran.returncode == 0, ran.stdout + ran.stderr

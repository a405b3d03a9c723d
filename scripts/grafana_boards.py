"""Write the Grafana boards of ``docker/grafana/boards``: ``scripts/grafana_boards.py``.

The boards are generated from the table below, so that their queries stay readable.
``tests/telemetry/test_prometheus.py`` compares the files with the table, and every query with the metrics that nodes
serve.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docker" / "grafana" / "boards"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 8, 8  # of 24 columns
NODE = 'instance=~"$instance"'


@dataclass(frozen=True)
class Panel:
    """A panel: its unit by Grafana's name, and ``(legend, query)`` for each series."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"


COMMON = (
    Panel("Window", "none", [("{{instance}}", f"tplr_window{{{NODE}}}")], "stat"),
    Panel(
        "Behind the newest window", "none", [("{{instance}}", f"tplr_window{{{NODE}}} - tplr_applied_window{{{NODE}}}")]
    ),
    Panel("Since the last block seen", "s", [("{{instance}}", f"time() - tplr_block_timestamp_seconds{{{NODE}}}")]),
    Panel(
        "Where the time goes",
        "percentunit",
        [
            (
                "{{phase}}",
                f"sum by (phase) (rate(tplr_phase_seconds_total{{{NODE}}}[15m])) "
                f"/ on () group_left () sum(rate(tplr_phase_seconds_total{{{NODE}}}[15m]))",
            )
        ],
    ),
    Panel("Seconds to apply a window", "s", [("{{instance}}", f"tplr_apply_duration_seconds{{{NODE}}}")]),
    Panel(
        "Listed updates: included, or why not",
        "none",
        [("{{result}}", f"sum by (result) (increase(tplr_gather_results_total{{{NODE}}}[30m]))")],
    ),
    Panel("Bytes of updates applied", "Bps", [("{{instance}}", f"rate(tplr_applied_bytes_total{{{NODE}}}[15m])")]),
    Panel(
        "Requests to buckets",
        "reqps",
        [("{{result}}", f"sum by (result) (rate(tplr_storage_requests_total{{{NODE}}}[15m]))")],
    ),
    Panel(
        "Rollbacks, checkpoints published, problems",
        "none",
        [
            ("rollbacks {{instance}}", f"tplr_rollbacks_total{{{NODE}}}"),
            ("checkpoints {{instance}}", f"tplr_checkpoints_published_total{{{NODE}}}"),
            ("problems {{instance}}", f"tplr_problems_total{{{NODE}}}"),
        ],
    ),
    Panel("Memory of the process", "bytes", [("{{instance}}", f"process_resident_memory_bytes{{{NODE}}}")]),
    Panel("Open files", "none", [("{{instance}}", f"process_open_fds{{{NODE}}}")]),
    Panel("Free disk for saved states", "bytes", [("{{instance}}", f"tplr_state_free_bytes{{{NODE}}}")]),
)
GPU = (
    Panel(
        "GPU memory",
        "bytes",
        [
            ("{{gpu}} used", f"tplr_gpu_memory_used_bytes{{{NODE}}}"),
            ("{{gpu}} of", f"tplr_gpu_memory_total_bytes{{{NODE}}}"),
        ],
    ),
    Panel("GPU busy", "percentunit", [("{{gpu}}", f"tplr_gpu_utilisation_ratio{{{NODE}}}")]),
    Panel(
        "GPU temperature and power",
        "none",
        [
            ("{{gpu}} °C", f"tplr_gpu_temperature_celsius{{{NODE}}}"),
            ("{{gpu}} W", f"tplr_gpu_power_watts{{{NODE}}}"),
        ],
    ),
)
MINER = (
    Panel("Training loss, nats per token", "none", [("{{instance}}", f"tplr_training_loss_nats{{{NODE}}}")]),
    Panel(
        "Part of a window that is training", "percentunit", [("{{instance}}", f"tplr_training_time_ratio{{{NODE}}}")]
    ),
    Panel("Tokens per second while training", "none", [("{{instance}}", f"tplr_training_tokens_per_second{{{NODE}}}")]),
    Panel(
        "Model FLOPs utilisation",
        "percentunit",
        [("{{instance}}", f"tplr_model_flops_utilisation_ratio{{{NODE}}}")],
    ),
    Panel("Tokens trained", "none", [("{{instance}}", f"tplr_trained_tokens_total{{{NODE}}}")]),
    Panel(
        "Windows missed",
        "none",
        [("{{cause}}", f"sum by (cause) (increase(tplr_windows_missed_total{{{NODE}}}[1h]))")],
    ),
    Panel("Bytes uploaded", "Bps", [("{{instance}}", f"rate(tplr_uploaded_bytes_total{{{NODE}}}[15m])")]),
    Panel("Memory by kind", "bytes", [("{{kind}}", f"tplr_memory_bytes{{{NODE}}}")]),
    *COMMON,
    *GPU,
)
VALIDATOR = (
    Panel("Loss on held-out pages, nats per token", "none", [("{{instance}}", f"tplr_held_out_loss_nats{{{NODE}}}")]),
    Panel("Scores", "none", [("uid {{uid}}", f"tplr_score{{{NODE}}}")]),
    Panel("Weights set", "percentunit", [("uid {{uid}}", f"tplr_weight_ratio{{{NODE}}}")]),
    Panel(
        "Since weights were set",
        "s",
        [("{{instance}}", f"time() - tplr_weights_set_timestamp_seconds{{{NODE}}}")],
    ),
    Panel("Strikes by rule", "none", [("{{rule}}", f"sum by (rule) (increase(tplr_strikes_total{{{NODE}}}[1h]))")]),
    Panel("Peer list", "none", [("{{list}}", f"tplr_peers{{{NODE}}}")]),
    Panel("Aggregates published", "none", [("{{instance}}", f"tplr_aggregates_published_total{{{NODE}}}")]),
    *COMMON,
    *GPU,
)
RUN = (
    Panel("Loss on held-out pages, nats per token", "none", [("held out", "avg(tplr_held_out_loss_nats)")]),
    Panel("Mean training loss, nats per token", "none", [("training", "avg(tplr_training_loss_nats)")]),
    Panel(
        "Evaluations: bits per byte on held-out pages",
        "none",
        [("{{instance}}", "tplr_evaluation_bits_per_byte")],
    ),
    Panel("Evaluations: results of tasks", "none", [("{{task}}", "max by (task) (tplr_evaluation_result)")]),
    Panel("Evaluations: newest window", "none", [("{{instance}}", "tplr_evaluated_window")], "stat"),
    Panel("Tokens per second of all miners", "none", [("tokens", "sum(rate(tplr_trained_tokens_total[15m]))")]),
    Panel("Nodes by role", "none", [("{{role}}", "count by (role) (tplr_info)")], "stat"),
    Panel("Part of a window that is training", "percentunit", [("mean", "avg(tplr_training_time_ratio)")]),
    Panel(
        "Miners' windows missed", "none", [("{{cause}}", "sum by (cause) (increase(tplr_windows_missed_total[1h]))")]
    ),
    Panel("Weights, mean of validators", "percentunit", [("uid {{uid}}", "avg by (uid) (tplr_weight_ratio)")]),
    Panel(
        "Newest window applied, first and last node",
        "none",
        [
            ("first", "max(tplr_applied_window)"),
            ("last", "min(tplr_applied_window)"),
        ],
    ),
    Panel("Rollbacks", "none", [("rollbacks", "sum(increase(tplr_rollbacks_total[1h]))")]),
)
BOARDS = {"miner": ("Miner", MINER), "validator": ("Validator", VALIDATOR), "run": ("Run", RUN)}


def board(name: str) -> dict[str, Any]:
    """Return the board as Grafana's JSON model (grafana.com/docs: dashboards, JSON model)."""
    title, panels = BOARDS[name]
    role = "" if name == "run" else f'role="{name}"'
    variable = {
        "name": "instance",
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values(tplr_info{{{role}}}, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": f"templar-{name}",
        "title": f"templar: {title}",
        "tags": ["templar"],
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [] if name == "run" else [variable]},
        "panels": [_panel(index, panel) for index, panel in enumerate(panels)],
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    across = 24 // WIDTH
    return {
        "id": index + 1,
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"x": index % across * WIDTH, "y": index // across * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(65 + at), "expr": query, "legendFormat": legend, "datasource": SOURCE}
            for at, (legend, query) in enumerate(panel.queries)
        ],
    }


def text_of(name: str) -> str:
    """Return the text of a board's file."""
    return json.dumps(board(name), indent=2) + "\n"


def main() -> None:
    """Write all boards."""
    for name in BOARDS:
        (FOLDER / f"{name}.json").write_text(text_of(name))


if __name__ == "__main__":
    main()

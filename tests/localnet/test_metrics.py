"""A real Prometheus scrapes a real network: every query of boards and alert rules has data."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from guides import GuideCommand, from_guide

from tplr.config import process_variables
from tplr.localnet.network import base_environment
from tplr.localnet.plan import make_plan
from tplr.localnet.process import Child
from tplr.localnet.supervisor import Localnet
from tplr.node.gpus import read_gpus

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache/tplr/localnet"
# Metrics without figures on these nodes, which train on the CPU.
NO_FLOP_PEAK = {"tplr_model_flops_utilisation_ratio"}  # only known for GPUs
NO_NVML = {
    "tplr_gpu_memory_used_bytes",
    "tplr_gpu_memory_total_bytes",
    "tplr_gpu_utilisation_ratio",
    "tplr_gpu_temperature_celsius",
    "tplr_gpu_power_watts",
}
# A series, or a function of it: a rule without its comparisons, which fail in a healthy network.
SERIES = re.compile(
    r"(?:(?:increase|max_over_time|min_over_time)\()?\b(?:tplr_\w+|process_\w+|up)\b(?:\{[^}]*\})?(?:\[\w+\]\))?"
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(480),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"),
]


def free_port() -> int:
    """Return the first free port of a range."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def prometheus(command: GuideCommand, folder: Path) -> Iterator[int]:
    """A server started with this command, with its data in ``folder``; its port."""
    port = free_port()
    options = [f"--storage.tsdb.path={folder}", "--log.level=warn", f"--web.listen-address=127.0.0.1:{port}"]
    process = subprocess.Popen([*command.process, *options], cwd=ROOT)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(10)


def ask(port: int, path: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)["data"]


def board_queries() -> set[str]:
    boards = (ROOT / "docker/grafana/boards").glob("*.json")
    panels = [panel for board in boards for panel in json.loads(board.read_text())["panels"]]
    return {target["expr"].replace("$instance", ".*") for panel in panels for target in panel["targets"]}


def rule_queries() -> set[str]:
    """Return each series that a rule compares."""
    (group,) = yaml.safe_load((ROOT / "docker/prometheus/alerts.yml").read_text())["groups"]
    return {found for rule in group["rules"] for found in SERIES.findall(rule["expr"])}


def silent(port: int) -> set[str]:
    """Return the metrics of queries without a result."""
    queries = [one for one in board_queries() | rule_queries() if not ask(port, "query", query=one)["result"]]
    return {name for query in queries for name in re.findall(r"tplr_\w+", query) or [query]}


def evaluator(net: Localnet, port: int, folder: Path) -> Child:
    """``tplr eval`` beside the network, with a task from local files."""
    command = from_guide("docs/monitoring.md", "tplr eval --follow --metrics-port 9101", {"9101": port})
    tasks = ("--tasks", "tplr_arithmetic", "--include", "examples/tasks", "--limit", "5")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return Child(
        "evaluator",
        [*command.process, "--local", net.plan.run_dir, *tasks],
        env=base_environment(process_variables(), folder / "home") | offline,
        folder=ROOT,  # paths of the task's files are relative to it
        log=folder / "evaluator.log",
    )


async def test_every_query_of_boards_and_rules_has_data(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    plan = make_plan(miners=2, windows=8, run_dir=tmp_path / "run", cache=CACHE, metrics_port=free_port())
    beside = free_port()
    async with Localnet(plan) as net:
        config = json.loads((plan.run_dir / "prometheus.yml").read_text())
        config["rule_files"] = [str(ROOT / "docker/prometheus/alerts.yml")]
        (scraped,) = config["scrape_configs"]
        scraped["static_configs"] += [{"targets": [f"127.0.0.1:{beside}"], "labels": {"node": "evaluator"}}]
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        from_guide(
            "docs/monitoring.md", "python neurons/miner.py … --metrics-port 9100", {"9100": plan.metrics_port + 1}
        ).check_run_by(net.nodes["miner-1"].command)
        own = {"docker/prometheus/prometheus.yml": tmp_path / "prometheus.yml"}
        command = from_guide("docs/monitoring.md", "prometheus --config.file docker/prometheus/prometheus.yml", own)
        evaluates = evaluator(net, beside, tmp_path)
        with prometheus(command, tmp_path / "tsdb") as port:
            try:
                await net.wait_until(lambda view: view.completed >= 1, timeout=120)
                evaluates.start()
                await net.wait_until(lambda view: view.completed >= plan.windows, timeout=240)
                async with asyncio.timeout(120):
                    while not ask(port, "query", query="tplr_evaluated_window")["result"]:
                        evaluates.check()
                        await asyncio.sleep(1)
                await asyncio.sleep(3)
                up = ask(port, "query", query="up")["result"]
                assert {one["metric"]["node"] for one in up} == {*net.nodes, "evaluator"}
                assert all(one["value"][1] == "1" for one in up)
                assert silent(port) == NO_FLOP_PEAK | (set() if read_gpus() else NO_NVML)
                (group,) = ask(port, "rules")["groups"]
                assert all(rule["health"] == "ok" for rule in group["rules"])
                alerts = ask(port, "alerts")["alerts"]
                assert {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"} <= {"DiskFull"}
            finally:
                await evaluates.stop()


async def test_the_shipped_configuration_is_served(tmp_path: Path) -> None:
    command = from_guide("docs/monitoring.md", "prometheus --config.file docker/prometheus/prometheus.yml")
    with prometheus(command, tmp_path) as port:
        async with asyncio.timeout(30):
            while not await asyncio.to_thread(answers, port):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        (group,) = ask(port, "rules")["groups"]
        assert len(group["rules"]) == (ROOT / "docker/prometheus/alerts.yml").read_text().count("alert: ")


def answers(port: int) -> bool:
    try:
        return bool(ask(port, "status/buildinfo"))
    except OSError:
        return False

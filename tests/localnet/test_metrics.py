"""A real Prometheus scrapes a network of real processes: every query of every board has data, every rule is read."""

import asyncio
import json
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
from guides import GuideCommand, from_guide

from tplr.localnet.plan import make_plan
from tplr.localnet.supervisor import Localnet

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache/tplr/localnet"
# What a healthy network on a CPU has none of.
ABSENT = (
    "tplr_gpu",
    "tplr_strikes_total",
    "tplr_windows_missed_total",
    "tplr_model_flops_utilisation_ratio",
    "tplr_evaluat",  # by tplr eval beside a network: tests/run/test_evaluate.py
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(360),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"),
]


def free_port() -> int:
    """The first of some ports that are free now."""
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


def board_queries() -> list[str]:
    boards = (ROOT / "docker/grafana/boards").glob("*.json")
    panels = [panel for board in boards for panel in json.loads(board.read_text())["panels"]]
    return [target["expr"].replace("$instance", ".*") for panel in panels for target in panel["targets"]]


async def test_every_query_of_the_boards_has_data(tmp_path: Path) -> None:
    plan = make_plan(miners=2, windows=8, run_dir=tmp_path / "run", cache=CACHE, metrics_port=free_port())
    async with Localnet(plan) as net:
        config = json.loads((plan.run_dir / "prometheus.yml").read_text())
        config["rule_files"] = [str(ROOT / "docker/prometheus/alerts.yml")]
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        from_guide(
            "docs/monitoring.md", "python neurons/miner.py … --metrics-port 9100", {"9100": plan.metrics_port + 1}
        ).check_run_by(net.nodes["miner-1"].command)
        own = {"docker/prometheus/prometheus.yml": tmp_path / "prometheus.yml"}
        command = from_guide("docs/monitoring.md", "prometheus --config.file docker/prometheus/prometheus.yml", own)
        with prometheus(command, tmp_path / "tsdb") as port:
            await net.wait_until(lambda view: view.completed >= plan.windows, timeout=240)
            await asyncio.sleep(3)
            up = ask(port, "query", query="up")["result"]
            assert {one["metric"]["node"] for one in up} == set(net.nodes)
            assert all(one["value"][1] == "1" for one in up)
            silent = [query for query in board_queries() if not ask(port, "query", query=query)["result"]]
            assert [query for query in silent if not any(name in query for name in ABSENT)] == []
            (group,) = ask(port, "rules")["groups"]
            assert all(rule["health"] == "ok" for rule in group["rules"])
            firing = {one["labels"]["alertname"] for one in ask(port, "alerts")["alerts"] if one["state"] == "firing"}
            assert firing <= {"DiskFull"}  # of this machine


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

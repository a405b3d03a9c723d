"""Weights & Biases, offline: its real client, no network. Skips without the extra."""

import builtins
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tplr.errors import ConfigError
from tplr.telemetry import Telemetry, WandbListener


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The client's module. The client reads its variables when its session starts, once."""
    module = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield module
    with contextlib.suppress(Exception):
        module.teardown()


@pytest.mark.usefixtures("wandb")
def test_numbers_of_events_become_charts(tmp_path: Path) -> None:
    with WandbListener("templar-test", name="miner 3") as listener:
        telemetry = Telemetry(role="miner", uid=3, listeners=(listener,))
        telemetry.emit("trained", window=7, loss=4.5, note="text")
        telemetry.emit("evaluated", window=7, peer=2, score=0.5)  # sealed
    (recorded,) = tmp_path.rglob("*.wandb")
    # Its process closes the file, which writes it, after `finish` has returned.
    ended = time.monotonic() + 60
    while b"trained/loss" not in (data := recorded.read_bytes()):
        assert time.monotonic() < ended, f"no loss among the {len(data)} bytes of {recorded.name}"
        time.sleep(0.02)
    assert b"trained/note" not in data
    assert b"evaluated/" not in data


@pytest.mark.usefixtures("wandb")
def test_the_node_outlives_the_process_of_the_client(caplog: pytest.LogCaptureFixture) -> None:
    with WandbListener("templar-test", name="miner 3") as listener:
        telemetry = Telemetry(role="miner", uid=3, listeners=(listener,))
        telemetry.emit("trained", window=7, loss=4.5)
        for process in children("wandb-core"):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for window in range(8, 11):
            telemetry.emit("trained", window=window, loss=4.5)
    assert len([one for one in caplog.messages if one.startswith("W&B gets no more events")]) == 1


def test_missing_extra_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_wandb(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "wandb":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    with pytest.raises(ConfigError, match=r"needs the extra: \.venv/bin/pip install"):
        WandbListener("templar-test", name="miner 3")


@pytest.mark.usefixtures("wandb")
def test_a_bad_variable_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(ConfigError, match="WANDB_MODE: Input should be 'online', 'offline'"):
        WandbListener("templar-test", name="miner 3")


@pytest.mark.usefixtures("wandb")
def test_a_node_starts_while_wandb_is_down(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Else it would end as misconfigured, and its service would not start it again."""
    monkeypatch.setattr("tplr.telemetry.wandb.INIT_SECONDS", 0.1)
    for name, value in {"MODE": "online", "API_KEY": "a" * 40, "BASE_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with WandbListener("templar-test", name="miner 3") as listener:
        Telemetry(role="miner", uid=3, listeners=(listener,)).emit("trained", window=7, loss=4.5)
    (message,) = [one for one in caplog.messages if one.startswith("W&B gets no events until")]
    assert "127.0.0.1:9" in message


class Answers(BaseHTTPRequestHandler):
    """What W&B answers to a new run, to every request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        bucket = {"id": "r", "name": "r", "displayName": "r", "project": project}
        body = json.dumps({"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.usefixtures("wandb")
def test_a_node_ends_while_wandb_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that crashes would not be started again."""
    monkeypatch.setattr("tplr.telemetry.wandb.FINISH_SECONDS", 0.5)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        try:
            listener = WandbListener("templar-test", name="miner 3")
        finally:
            server.shutdown()
    with listener:
        Telemetry(role="miner", uid=3, listeners=(listener,)).emit("trained", window=7, loss=4.5)
    assert not listener._lost


def children(name: str) -> list[int]:
    """Return this process's children that run ``name``."""
    found = [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return [pid for pid in found if name in Path(f"/proc/{pid}/cmdline").read_text()]

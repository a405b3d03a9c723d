"""The server as a process: announced, killed, restarted, its port refused; bounded memory."""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_python import interpreter
from guides import all_of_guide, words

from tplr.errors import AccessDenied
from tplr.schemas import Bucket
from tplr.storage import S3Connections

MIB = 2**20


class HalfBody(io.BufferedIOBase):
    """A file of 8 MiB whose second half can't be read before ``go`` is set."""

    size = 8 * MIB

    def __init__(self) -> None:
        self.position = 0
        self.go = threading.Event()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def read(self, size: int | None = -1) -> bytes:
        if self.position >= self.size // 2:
            self.go.wait()
        count = min(MIB, self.size - self.position)
        self.position += count
        return bytes(count)


@pytest.fixture
def start(tmp_path: Path, keys: Any) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, new: bool = False) -> subprocess.Popen[str]:
        """``new``: in an interpreter with memory of its own, and not in a fork."""
        (tmp_path / "ready.json").unlink(missing_ok=True)
        command = [
            *([sys.executable] if new else interpreter()),
            "-m",
            "tplr.testing.s3server",
            "--root",
            str(tmp_path / "root"),
        ]
        command += ["--keys", str(tmp_path / "keys.json"), "--ready-file", str(tmp_path / "ready.json")]
        started.append(subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


async def ready(tmp_path: Path, process: subprocess.Popen[str]) -> SimpleNamespace:
    while not (tmp_path / "ready.json").exists():
        assert process.poll() is None, process.communicate()
        await asyncio.sleep(0.02)
    facts = json.loads((tmp_path / "ready.json").read_text())
    return SimpleNamespace(endpoint=f"http://{facts['host']}:{facts['port']}", pid=facts["pid"])


async def test_a_killed_server_comes_back_with_every_object_that_it_confirmed(
    start: Any, tmp_path: Path, connect: Any
) -> None:
    process = start("--port", "0", "--no-write-rate")
    server = await ready(tmp_path, process)
    s3 = await connect(server)
    for number in range(5):
        await s3.put_object(Bucket="gradients", Key=f"key-{number}", Body=bytes([number]) * 100_000)
    # Killed in the middle of a body, whose key has an older object.
    body = HalfBody()
    put = asyncio.create_task(s3.put_object(Bucket="gradients", Key="key-0", Body=body))
    while not list((tmp_path / "root/drafts").iterdir()):
        assert not put.done(), put.exception()
        await asyncio.sleep(0.01)
    os.kill(server.pid, signal.SIGKILL)
    process.wait()
    body.go.set()
    await asyncio.gather(put, return_exceptions=True)
    s3 = await connect(await ready(tmp_path, start("--port", "0")))
    for number in range(5):
        got = await s3.get_object(Bucket="gradients", Key=f"key-{number}")
        assert await got["Body"].read() == bytes([number]) * 100_000
    assert list((tmp_path / "root/drafts").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_cleanly_in_the_middle_of_an_answer(
    start: Any, tmp_path: Path, connect: Any, number: int
) -> None:
    process = start("--port", "0")
    s3 = await connect(await ready(tmp_path, process))
    await s3.put_object(Bucket="gradients", Key="a", Body=bytes(32 * MIB))
    answer = await s3.get_object(Bucket="gradients", Key="a")
    await answer["Body"].read(10)  # and then stop reading: the server is stuck in the answer
    process.send_signal(number)
    _, errors = await asyncio.to_thread(process.communicate, timeout=10)
    assert process.returncode == 0
    assert "Traceback" not in errors


async def test_the_guides_commands_start_it(tmp_path: Path) -> None:
    write_keys, serve = all_of_guide("docs/s3server.md")
    subprocess.run(["sh", "-c", write_keys], cwd=tmp_path, check=True)  # noqa: ASYNC221
    command = [sys.executable, *words(serve)[1:], "--ready-file", "ready.json"]
    assert command[-4:-2] == ["--port", "9000"]
    command[-3] = "0"
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)  # noqa: ASYNC220
    try:
        server = await ready(tmp_path, process)
        assert server.pid == process.pid
        key = {"access_key_id": "1" * 32, "secret_access_key": "1" * 64}
        async with S3Connections(server.endpoint) as connections:
            store = connections.store(Bucket(name="models", account_id="a" * 32, **key))
            await store.put("weights", b"1")
            assert (tmp_path / "objects").is_dir()
            with pytest.raises(AccessDenied):
                await connections.store(Bucket(name="logs", account_id="a" * 32, **key)).put("line", b"1")
    finally:
        process.kill()
        process.communicate()


async def test_every_request_is_a_line_of_its_log(start: Any, tmp_path: Path, connect: Any) -> None:
    process = start("--port", "0", "--requests", str(tmp_path / "requests.jsonl"))
    s3 = await connect(await ready(tmp_path, process))
    await s3.put_object(Bucket="gradients", Key="a", Body=bytes(1000))
    await (await s3.get_object(Bucket="gradients", Key="a"))["Body"].read()
    await s3.head_object(Bucket="gradients", Key="a")
    process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.communicate, timeout=10)
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [(one["method"], one["path"].partition("?")[0], one["status"], one["bytes"]) for one in lines] == [
        ("PUT", "/gradients/a", 200, 0),
        ("GET", "/gradients/a", 200, 1000),
        ("HEAD", "/gradients/a", 200, 0),
    ]
    assert all(0 <= one["seconds"] < 10 for one in lines)


def test_a_port_in_use_is_one_clear_line(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("--port", str(port))
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors == f"port {port} is in use on 127.0.0.1; choose another with --port\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--root", "/proc/nowhere"], "/proc/nowhere"),
        (["--requests", "/nowhere/requests.jsonl"], "/nowhere/requests.jsonl"),
        (["--ready-file", "/proc/nowhere/ready.json"], "/proc/nowhere/ready.json"),
        (["--host", "192.0.2.1"], "192.0.2.1"),
        (["--port", "70000"], "--port 70000"),
    ],
)
def test_why_it_can_not_start_is_one_line(start: Any, arguments: list[str], problem: str) -> None:
    process = start("--port", "0", *arguments)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert problem in errors
    assert "Traceback" not in errors


def test_a_wrong_key_table_is_said(start: Any, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text('{"me": {}}')
    process = start("--port", "0")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "an access key id is 32 characters" in errors
    assert "Traceback" not in errors


async def test_bodies_are_streamed_both_ways(start: Any, tmp_path: Path, connect: Any) -> None:
    server = await ready(tmp_path, start("--port", "0", "--no-write-rate", new=True))
    s3 = await connect(server)
    await s3.put_object(Bucket="gradients", Key="a", Body=bytes(MIB))
    before = peak_memory(server.pid)
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(96 * MIB)
    with path.open("rb") as file:
        await s3.put_object(Bucket="gradients", Key="a", Body=file)
    answer = await s3.get_object(Bucket="gradients", Key="a")
    size = 0
    async for chunk in answer["Body"].iter_chunks(MIB):
        size += len(chunk)
    assert size == 96 * MIB
    assert peak_memory(server.pid) - before < 24 * MIB


def peak_memory(pid: int) -> int:
    """Return the peak memory in bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

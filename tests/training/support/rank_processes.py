"""Ranks as real processes over gloo, forked from a server that has imported torch, so starts import nothing.

Run as a program, this file is a rank.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_python

DEADLINE = 400.0  # seconds, on a machine that is busy with other tests
TORCHRUN_RANK = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from rank_life import torchrun_rank
torchrun_rank(*sys.argv[1:])
"""


@dataclass(frozen=True)
class Ended:
    """How the ranks ended.

    Attributes:
        codes: exit status of each rank; None if it still ran at the deadline.
        results: of each rank that returned one.
        logs: standard error of each rank.
        seconds: until the last rank ended.
    """

    codes: list[int | None]
    results: list[Any]
    logs: list[str]
    seconds: float


def run_ranks(size: int, place: Path, function: str, *, stopped: int | None = None, **arguments: Any) -> Ended:
    """Run ``rank_life.FUNCTION(**arguments)`` on ``size`` ranks; the arguments and each result are JSON.

    Args:
        stopped: a rank that hangs; it is ended after the others have ended.
    """
    place.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    began, processes = time.monotonic(), []
    for rank in range(size):
        command = [__file__, str(place / f"{rank}.json"), function, json.dumps(arguments)]
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (place / f"{rank}.log").open("wb") as log:
            processes.append(forked_python.start(command, env=env | own, folder=place, stdout=log.fileno()))
    for rank, process in enumerate(processes):
        if rank != stopped:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, began + DEADLINE - time.monotonic()))
    seconds, codes = time.monotonic() - began, [process.poll() for process in processes]
    for process in processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(codes, [_read(place / f"{rank}.json") for rank in range(size)], _logs(place, size), seconds)


def torchrun(size: int, *arguments: str, max_restarts: int) -> None:
    """Run ``rank_life.torchrun_rank`` under the agent of ``torchrun``, which starts all again when one has died.

    ``torchrun`` itself would start an interpreter for each life of each rank; this function uses forks of the server.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
    )
    program, *options = forked_python.interpreter(forked_python.server())
    command = [*options, "-c", TORCHRUN_RANK, str(Path(__file__).parent), *arguments]
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        elastic_launch(config, program)(*command)
    finally:
        for number, handler in handlers.items():  # the agent leaves its own handlers
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _logs(folder: Path, size: int) -> list[str]:
    return [(folder / f"{rank}.log").read_text() for rank in range(size)]


if __name__ == "__main__":
    result, function, arguments = sys.argv[1:]
    Path(result).write_text(
        json.dumps(getattr(importlib.import_module("rank_life"), function)(**json.loads(arguments)))
    )

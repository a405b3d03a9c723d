"""Ranks as real processes over gloo, forked from a server that has imported torch, so starts import nothing."""

import functools
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

DEADLINE = 400.0  # seconds, on a machine that is busy with other tests
_CONTEXT = multiprocessing.get_context("forkserver")


@functools.cache
def _start_server() -> None:
    """The server imports ``rank_life`` only if it finds it: it inherits variables, not ``sys.path``."""
    _CONTEXT.set_forkserver_preload(["rank_life"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ |= {} if before is None else {"PYTHONPATH": before}


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
    """Run ``rank_life.FUNCTION(**arguments)`` on ``size`` ranks; each result is JSON.

    Args:
        stopped: a rank that hangs; it is ended after the others have ended.
    """
    _start_server()
    place.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        _CONTEXT.Process(target=_run, args=(rank, size, port, place, function, arguments), daemon=True)
        for rank in range(size)
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        if rank != stopped:
            process.join(max(0.0, began + DEADLINE - time.monotonic()))
    seconds, codes = time.monotonic() - began, [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return Ended(codes, [_read(place / f"{rank}.json") for rank in range(size)], _logs(place, size), seconds)


def torchrun(size: int, *arguments: str, max_restarts: int) -> None:
    """Run ``rank_life.torchrun_rank`` under the agent of ``torchrun``, which starts all again when one has died.

    ``torchrun`` itself would start an interpreter for each life of each rank; this function uses forks of the server.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _start_server()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        start_method="forkserver",
    )
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        elastic_launch(config, importlib.import_module("rank_life").torchrun_rank)(*arguments)
    finally:
        for number, handler in handlers.items():  # the agent leaves its own handlers
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _logs(folder: Path, size: int) -> list[str]:
    return [(folder / f"{rank}.log").read_text() for rank in range(size)]


def _run(rank: int, size: int, port: int, folder: Path, function: str, arguments: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    log = (folder / f"{rank}.log").open("w")
    os.dup2(log.fileno(), sys.stderr.fileno())
    result = getattr(importlib.import_module("rank_life"), function)(**arguments)
    (folder / f"{rank}.json").write_text(json.dumps(result))

"""Commands: methods that rank 0 calls and that run on every rank with rank 0's arguments.

A method marked ``@command`` is an SPMD function. Rank 0 sends its name and arguments to the others, which wait in
``Commands.serve``, and all ranks execute it. At its end they compare whether it succeeded.

If all ranks raise an error of this package (``TplrError``), they continue. Any other failure ends the rank's process at
once, and then all others': a dead rank closes its connections, and a hanging one exceeds a collective's timeout.
``torchrun --max-restarts`` restarts them. So no barrier is needed before a collective, and no rank continues with a
diverged model.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update
from tplr.errors import TplrError
from tplr.logging import logger
from tplr.training.evaluation import Baseline
from tplr.training.parallel import ParallelContext

# Timeout between commands: the other ranks wait while rank 0 waits for the chain or a bucket.
BETWEEN_COMMANDS = datetime.timedelta(days=365)
END = -1  # sent in place of a length: there is no next command

P = ParamSpec("P")
R = TypeVar("R")


class Commanded(Protocol):
    """An object with commands; every rank has one.

    Attributes:
        commands: None in a single process.
        spec: layout of the updates in the commands' arguments.
    """

    commands: Commands | None

    @property
    def spec(self) -> PayloadSpec: ...


T = TypeVar("T", bound=Commanded)


def command(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Make a method run on all ranks when rank 0 calls it. ``_encode`` must support its arguments."""

    @functools.wraps(method)
    def on_all_ranks(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.commands is None:
            return method(self, *args, **kwargs)
        return self.commands.run(method, self, args, kwargs)

    return on_all_ranks


class Commands:
    """Sends and executes the commands of one process group. Rank 0 may call them from several threads.

    Args:
        timeout: of a command's collectives.
    """

    def __init__(self, parallel: ParallelContext, timeout: datetime.timedelta) -> None:
        self.parallel = parallel
        self._between: Any = dist.new_group(backend="gloo", timeout=BETWEEN_COMMANDS)
        # A separate group, so that the end of a command never matches a collective that another rank is still in.
        self._status: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._lock = threading.Lock()

    def run(self, method: Callable[..., R], target: Commanded, args: tuple, kwargs: dict[str, Any]) -> R:
        """Execute a command on all ranks; return rank 0's result. Raises only errors that all ranks raise."""
        with self._lock, self._fatal(method.__name__):
            self._send(method.__name__, args, kwargs)
            return self._execute(method, target, args, kwargs)

    def serve(self, target: Commanded) -> None:
        """Execute rank 0's commands until ``end``; for all ranks but 0."""
        while True:
            with self._fatal("between commands"):
                received = self._receive(target.spec)
            if received is None:
                return
            name, args, kwargs = received
            with self._fatal(name), suppress(TplrError):
                self._execute(_method(target, name), target, args, kwargs)

    def hear(self, seconds: float) -> None:
        """Wait at most ``seconds`` for rank 0's next command or end. For a rank that can't serve; it must then exit."""
        with suppress(RuntimeError):  # timeout, or rank 0 has ended
            word = dist.broadcast(torch.tensor(0), src=0, group=self._between, async_op=True)
            assert word
            word.wait(datetime.timedelta(seconds=seconds))

    def end(self) -> None:
        """Tell the other ranks that there is no next command; called by rank 0."""
        with suppress(RuntimeError):  # the other ranks have ended already
            dist.broadcast(torch.tensor(END), src=0, group=self._between)

    def _execute(self, method: Callable[..., R], target: Commanded, args: Sequence[Any], kwargs: dict[str, Any]) -> R:
        problem: TplrError | None = None
        result: Any = None
        try:
            result = method(target, *args, **kwargs)
        except TplrError as error:
            problem = error
        failed = torch.tensor(int(problem is not None))
        dist.all_reduce(failed, group=self._status)
        if failed not in (0, self.parallel.size):
            raise RuntimeError(f"{int(failed)} of {self.parallel.size} ranks failed, this one with {problem!r}")
        if problem:
            raise problem
        return result

    def _send(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        buffers: list[bytes] = []
        call = {"name": name, "args": _encode(list(args), buffers), "kwargs": _encode(kwargs, buffers)}
        text = json.dumps(call | {"sizes": [len(one) for one in buffers]}).encode()
        dist.broadcast(torch.tensor(len(text)), src=0, group=self._between)
        for data in (text, *buffers):
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), src=0) if data else None

    def _receive(self, spec: PayloadSpec) -> tuple[str, list, dict[str, Any]] | None:
        length = torch.tensor(0)
        dist.broadcast(length, src=0, group=self._between)
        if length == END:
            return None
        call = json.loads(_received(int(length)).tobytes())
        buffers = [_received(size) for size in call["sizes"]]
        return call["name"], _decode(call["args"], buffers, spec), _decode(call["kwargs"], buffers, spec)

    def _fatal(self, what: str) -> _EndProcess:
        return _EndProcess(self.parallel.rank, what)


class _EndProcess:
    """Ends the process if the block raises an error that other ranks may not raise."""

    def __init__(self, rank: int, what: str) -> None:
        self._rank = rank
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and not isinstance(error, TplrError):
            end_process(f"rank {self._rank} failed, {self._what}: all ranks restart", error)


def end_process(text: str, error: BaseException) -> NoReturn:
    """Log and exit with status 1. Skips the clean-up of a process group, which can wait forever for a dead rank."""
    logger.critical("%s", text, exc_info=error)
    logging.shutdown()
    os._exit(1)


def _method(target: Commanded, name: str) -> Callable[..., Any]:
    """Return the method without its ``@command`` wrapper."""
    return getattr(type(target), name).__wrapped__


def _received(size: int) -> np.ndarray:
    data = torch.empty(size, dtype=torch.uint8)
    if size:
        dist.broadcast(data, src=0)
    return data.numpy()


def _encode(value: Any, buffers: list[bytes]) -> Any:
    """Convert a value to JSON; bytes and arrays go into ``buffers``. Lists and JSON values are unchanged."""
    match value:
        case list() | tuple():
            return [_encode(one, buffers) for one in value]
        case bytes():
            buffers.append(value)
            content = ["bytes", len(buffers) - 1]
        case np.ndarray():
            buffers.append(value.tobytes())
            content = ["array", len(buffers) - 1, value.dtype.str, value.shape]
        case Path():
            content = ["path", str(value)]
        case dict():
            content = ["dict", {key: _encode(one, buffers) for key, one in value.items()}]
        case Baseline():
            content = ["baseline", _encode(value.batches, buffers), _encode(value.losses, buffers)]
        case Update():
            rest = {one.name: getattr(value, one.name) for one in fields(value) if one.init and one.name != "spec"}
            content = ["update", _encode(rest, buffers)]
        case _:
            return value
    return {"": content}


def _decode(value: Any, buffers: list[np.ndarray], spec: PayloadSpec) -> Any:
    """Invert ``_encode``."""
    if isinstance(value, list):
        return [_decode(one, buffers, spec) for one in value]
    if not isinstance(value, dict):
        return value
    kind, content, *more = value[""]
    match kind:
        case "bytes":
            found = buffers[content].tobytes()
        case "array":
            found = buffers[content].view(more[0]).reshape(more[1])
        case "path":
            found = Path(content)
        case "dict":
            found = {key: _decode(one, buffers, spec) for key, one in content.items()}
        case "baseline":
            found = Baseline(_decode(content, buffers, spec), _decode(more[0], buffers, spec))
        case _:
            found = Update(spec=spec, **_decode(content, buffers, spec))  # rank 0 has checked the body
    return found

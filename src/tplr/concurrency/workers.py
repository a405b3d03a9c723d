"""Worker pool: calls one function in several threads or processes."""

import contextlib
import multiprocessing
import pickle
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from tplr.resources import available_cores

ExecutorType = Literal["process", "thread"]
_JOIN_SECONDS = 10.0


class WorkerDied(RuntimeError):
    """A worker process ended during a call: killed, out of memory, or crashed."""


class RemoteTraceback(Exception):
    """The traceback, as text, of an exception in a worker process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Job(Future[Any]):
    """The future of a call.

    Attributes:
        item: argument of the function.
        seconds: duration of the call, including the transfer to a process and back.
    """

    seconds: float = 0.0

    def __init__(self, item: Any) -> None:
        super().__init__()
        self.item = item


class Failed:
    """An exception in place of a value. Pickles with its traceback as text, which becomes its cause; an exception that
    can't be pickled becomes a RuntimeError."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        text = "".join(traceback.format_exception(self.error))
        try:
            packed = pickle.dumps(self.error)
            pickle.loads(packed)  # noqa: S301 - our own bytes; some exceptions can be pickled but not unpickled
        except Exception:  # noqa: BLE001
            packed = pickle.dumps(RuntimeError(f"{type(self.error).__name__} in a worker process\n{text}"))
        return _failed, (packed, text)


def _failed(packed: bytes, text: str) -> Failed:
    error = pickle.loads(packed)  # noqa: S301
    error.__cause__ = RemoteTraceback(text)
    return Failed(error)


class Portable(list[Any]):
    """A list; an item that can't be pickled arrives as ``Failed`` in the other process."""

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            packed = pickle.dumps([*self])
        except Exception:  # noqa: BLE001 - tell the item at fault
            packed = pickle.dumps([_packable(item) for item in self])
        return _portable, (packed,)


def _portable(packed: bytes) -> Portable:
    return Portable(pickle.loads(packed))  # noqa: S301 - our own bytes


def _packable(item: Any) -> Any:
    try:
        pickle.dumps(item)
    except Exception as error:  # noqa: BLE001 - becomes the item
        return Failed(error)
    return item


class Workers:
    """``submit(item)`` returns a future of ``function(item)``. ``count`` items run at a time; the others wait.

    Threads are daemons, so a call that never returns does not block the interpreter's exit. Processes are never forked
    from this one: a fork would copy locks and sockets that other threads hold.

    ``concurrent.futures`` offers neither: it waits for its threads at exit, and one dead process ends its whole pool.

    Args:
        preload: modules that all processes need. They are imported once, by a server from which the processes are
            forked; without any, each process is spawned.

    Raises:
        TypeError: the function can't be sent to a process.
        RuntimeError: this process may not start others.
    """

    def __init__(
        self, function: Callable[[Any], Any], count: int, kind: ExecutorType, *, preload: Sequence[str] = ()
    ) -> None:
        if kind == "process" and multiprocessing.current_process().daemon:
            raise RuntimeError(
                'a DataLoader worker can\'t start processes: use executor_type="thread", or num_workers=0 in the loader'
            )
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._remotes = [_Remote(function, preload) for _ in range(count)] if kind == "process" else []
        calls: list[Callable[[Any], Any]] = [*self._remotes] or [function] * count
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs, call), name="tplr-data-worker", daemon=True)
            for call in calls
        ]
        for thread in self._threads:
            thread.start()
        self._stop = weakref.finalize(self, _stop, self._jobs, self._remotes, self._threads)
        self._stop.atexit = False  # threads are daemons, and multiprocessing ends its daemons itself: wait for none

    def submit(self, item: Any) -> Job:
        """Submit a call; return its future. Raises RuntimeError after ``close``."""
        if not self._stop.alive:
            raise RuntimeError("the workers are closed")
        job = Job(item)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Cancel the waiting items, let threads finish their call, end processes. Idempotent."""
        self._stop()


def worker_count(max_workers: int | None, prefetch_factor: int, executor_type: str) -> int:
    """``max_workers``; by default ``resources.available_cores``.

    Raises:
        ValueError: an argument is out of range.
    """
    if max_workers is None:
        max_workers = available_cores()
    if max_workers < 1 or prefetch_factor < 1:
        raise ValueError(f"expected max_workers and prefetch_factor above 0, got {max_workers} and {prefetch_factor}")
    if executor_type not in ("process", "thread"):
        raise ValueError(f'executor_type: expected "process" or "thread", got {executor_type!r}')
    return max_workers


class _Remote:
    """Calls the function in a process."""

    def __init__(self, function: Callable[[Any], Any], preload: Sequence[str]) -> None:
        try:
            pickle.dumps(function)
        except Exception as error:
            raise TypeError(
                f"{function!r} can't be sent to a process ({error}): define it at the top of a module, or use "
                f'executor_type="thread"'
            ) from error
        context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
        if preload:
            context.set_forkserver_preload([*preload])
        self._connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, item: Any) -> Any:
        try:
            self._connection.send(item)
            value = self._connection.recv()
        except (EOFError, OSError) as error:
            self.process.join(_JOIN_SECONDS)
            raise WorkerDied(f"a worker process ended with status {self.process.exitcode} during a call") from error
        if isinstance(value, Failed):
            raise value.error
        return value

    def stop(self) -> None:
        self.process.terminate()
        self.process.join(_JOIN_SECONDS)
        self._connection.close()


def _serve(connection: Connection, function: Callable[[Any], Any]) -> None:
    # EOF: the parent closed its end or ended.
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            item = connection.recv()
            try:
                answer = pickle.dumps(function(item))
            except Exception as error:  # noqa: BLE001 - raised by the caller's future
                answer = pickle.dumps(Failed(error))
            connection.send_bytes(answer)


def _work(jobs: "queue.SimpleQueue[Job | None]", call: Callable[[Any], Any]) -> None:
    while (job := jobs.get()) is not None:
        if job.set_running_or_notify_cancel():
            began = time.perf_counter()
            try:
                answer = call(job.item)
                job.seconds = time.perf_counter() - began
                job.set_result(answer)
                del answer
            except BaseException as error:  # noqa: BLE001 - raised by the caller's future
                job.set_exception(error)
        del job  # an idle worker keeps no sample alive


def _stop(jobs: "queue.SimpleQueue[Job | None]", remotes: list[_Remote], threads: list[threading.Thread]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            if job := jobs.get_nowait():
                job.cancel()
    for _ in threads:
        jobs.put(None)
    for remote in remotes:
        remote.stop()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

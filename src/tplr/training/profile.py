"""Writes a profiler trace of one window's training, and on a GPU a memory snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tplr.errors import ConfigError
from tplr.logging import logger
from tplr.training.local import Stop

BATCHES = 16  # in the trace; a whole window of a large model would take gigabytes
MEMORY_EVENTS = 100_000


T_co = TypeVar("T_co", covariant=True)


class Run(Protocol[T_co]):
    """A window's training."""

    def __call__(self, *, stop: Stop) -> T_co: ...


class WindowProfile:
    """Profiles the second trained window, because the first one waits for compilers and allocators.

    ``window-W.trace.json`` opens in https://ui.perfetto.dev, ``window-W.memory.pickle`` in
    https://pytorch.org/memory_viz.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if ``folder`` can't be made."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--profile {folder}: {error.strerror}; give a writable folder") from error
        self._folder = folder
        self._windows = 0

    def run(self, run: Run[T_co], window: int, *, stop: Stop) -> T_co:
        """Call ``run``, and profile it if this is the second window. Blocks."""
        self._windows += 1
        if self._windows != 2:
            return run(stop=stop)
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        trace = self._folder / f"window-{window}.trace.json"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=0, active=BATCHES, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
        ) as profiler:
            work = run(stop=_Stepping(profiler, stop))
        logger.info("trace of window %d's first batches: %s", window, trace)
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"window-{window}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        return work


class _Stepping:
    """Wraps ``stop``, which is called before each batch, so that a profiler step is a batch."""

    def __init__(self, profiler: profile, stop: Stop) -> None:
        self._profiler = profiler
        self._stop = stop

    def __call__(self) -> bool:
        self._profiler.step()
        return self._stop()

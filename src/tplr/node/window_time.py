"""Measures how a node spends a window: each moment belongs to exactly one phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# ``waiting_for_end``: waits for the next window. ``saving``: waits for a save that must end before tensors change.
PHASES: tuple[str, ...] = (
    "training",
    "evaluating",
    "waiting_for_pages",
    "packing",
    "uploading",
    "waiting_for_bound",
    "gathering",
    "applying",
    "saving",
    "waiting_for_end",
    "other",
)


@dataclass(frozen=True)
class ModelSpeed:
    """A model and the machine that trains it.

    Attributes:
        flops_per_token: of forward and backward pass, see ``planner.workload.Workload``.
        peak: of all devices together, FLOP per second of dense bfloat16 matrix products; None if it is unknown.
    """

    flops_per_token: float
    peak: float | None

    def utilisation(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation: ``tokens per second * FLOPs per token / peak`` (PaLM, arXiv 2204.02311, appendix B).

        The peak is that of bfloat16 for every precision of the run.
        """
        return tokens_per_second * self.flops_per_token / self.peak if self.peak else None


class WindowTime:
    """A stopwatch with phases. A nested phase interrupts the outer one, so the phases sum to the elapsed time.

    Time outside of all phases is ``waiting_for_end``: an idle node waits for the next window.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase = "waiting_for_end"
        self._since = monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of this context as ``name``, one of ``PHASES``."""
        before = self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    def move(self, phase: str, to: str, seconds: float) -> None:
        """Move ``seconds`` from ``phase`` to ``to``, at most all that ``phase`` has; a negative number counts as 0."""
        self._enter(self._phase)
        moved = max(0.0, min(seconds, self._seconds[phase]))
        self._seconds[phase] -= moved
        self._seconds[to] += moved

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        self._enter(self._phase)
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds

    def _enter(self, phase: str) -> str:
        now = self._monotonic()
        self._seconds[self._phase] += now - self._since
        before, self._phase, self._since = self._phase, phase, now
        return before

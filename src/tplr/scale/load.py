"""Models request delays when nodes and stores share a few processors, as in a localnet.

Right after a window's end all nodes fetch the same updates: a burst. Each node's requests take processor time of the
node and of the store. Nodes share the processors equally, and no node uses more than one (``links.finish_times``, with
seconds of processor time in place of bytes). A node requests all its updates at once, in ``ROUNDS`` successive rounds.
A store answers requests in order of arrival, so any other request during a burst waits for about one node's round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tplr.scale.links import finish_times

# Successive requests for an available update: HEAD, HEAD of its commit, GET.
ROUNDS = 3
INFINITE = math.inf


@dataclass(frozen=True)
class Burst:
    """The burst of requests of a window's gathers; times are in seconds.

    Attributes:
        done: time at which each node's requests have received all their processor time.
        begin, end: time of the burst's first request, and of its end.
        round: duration of one round of the median node.
    """

    done: np.ndarray
    begin: float
    end: float
    round: float

    @classmethod
    def of(
        cls, begins: np.ndarray, work: np.ndarray, *, cores: float, others: Sequence[tuple[float, float]] = ()
    ) -> Burst:
        """Compute a burst.

        Args:
            begins: time at which each node begins its requests, in seconds.
            work: processor time of each node's requests, in seconds; 0: the node sends none.
            cores: number of processors; infinite: each node has its own.
            others: begin and processor time of each other task that runs during the burst.
        """
        starts = [*begins.tolist(), *(begin for begin, _ in others)]
        sizes = [*work.tolist(), *(seconds for _, seconds in others)]
        done = np.array(finish_times(starts, sizes, capacity=cores, connection=1.0)[: len(begins)])
        asking = work > 0
        if not asking.any() or math.isinf(cores):
            return cls(done, INFINITE, -INFINITE, 0.0)
        lasts = float(np.median((done - begins)[asking]))
        return cls(done, float(begins[asking].min()), float(done[asking].max()), lasts / ROUNDS)

    def wait(self, at: float) -> float:
        """Return the seconds for which a request that begins ``at`` waits for the burst's requests."""
        return min(self.round, self.end - at) if self.begin <= at < self.end else 0.0

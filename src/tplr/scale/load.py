"""What requests wait for where nodes and stores share a few processors, as those of a localnet do.

Right after a window's end all nodes fetch the same updates: a burst. Each node's requests take processor time, its own
and the store's; nodes share the processors equally, and none uses more than one of them (``links.finish_times``, with
seconds of processor time for bytes). A node asks for all its updates at once, in ``ROUNDS`` rounds of requests that
follow each other. A store answers in the order of arrival. So any other request that comes in a burst waits for about
as long as a node's round takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tplr.scale.links import finish_times

# Requests for an update that is there, each after the one before: HEAD, HEAD of its commit, GET.
ROUNDS = 3
INFINITE = math.inf


@dataclass(frozen=True)
class Burst:
    """The requests of a window's gathers.

    Attributes:
        done: when each node's requests have had their processor time, in seconds.
        begin, end: of the burst; ``round``: seconds of one round of the median node.
    """

    done: np.ndarray
    begin: float
    end: float
    round: float

    @classmethod
    def of(
        cls, begins: np.ndarray, work: np.ndarray, *, cores: float, others: Sequence[tuple[float, float]] = ()
    ) -> Burst:
        """A burst of nodes.

        Args:
            begins: when each node begins to ask, in seconds.
            work: processor time of each node's requests, in seconds; 0: it asks for nothing.
            cores: processors; infinite: each node has its own.
            others: begin and processor time of what else runs then.
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
        """Seconds for which a request that begins ``at`` waits for those of the burst."""
        return min(self.round, self.end - at) if self.begin <= at < self.end else 0.0

"""A pass over batches that ranks take alternately, and the losses of all their sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tplr.errors import TrainingError
from tplr.training.local import Stop, never
from tplr.training.parallel import ParallelContext


def own_batches(
    batches: np.ndarray, parallel: ParallelContext, stop: Stop = never
) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield this rank's batches, and whether each counts.

    In an incomplete last round idle ranks repeat the last batch, which does not count: collectives need every rank.

    Args:
        batches: (batches, B, T) token ids.
        stop: called before each batch; True on any rank ends the pass.

    Raises:
        TrainingError: the pass was ended.
        ValueError: no batches.
    """
    if not len(batches):
        raise ValueError("no batches: the pages contain less text than one batch")
    for begin in range(0, len(batches), parallel.size):
        check_stopped(stop(), parallel)
        number = begin + parallel.rank
        yield batches[min(number, len(batches) - 1)], number < len(batches)


def all_losses(own: Sequence[torch.Tensor], batches: np.ndarray, parallel: ParallelContext) -> np.ndarray:
    """Return the losses of all ranks' sequences in the order of the batches, float64 [batches * B].

    Args:
        own: losses of the sequences of each of this rank's batches, float64 [B].
        batches: as in ``own_batches``.
    """
    by_rank = parallel.gather_bytes(torch.cat([*own]).cpu().numpy().tobytes())
    rounds = np.stack([np.frombuffer(one).reshape(len(own), -1) for one in by_rank], axis=1)
    return rounds.reshape(-1)[: len(batches) * batches.shape[1]]


def check_stopped(stopped: bool, parallel: ParallelContext) -> None:
    """Raise TrainingError on all ranks if any of them has ``stopped``."""
    if parallel.any(stopped):
        raise TrainingError("this node is about to end")


def check_finite(losses: np.ndarray) -> None:
    """Raise TrainingError if a loss of the model without any update is not finite."""
    if not np.isfinite(losses).all():
        raise TrainingError("the model's own loss is not finite: no update can be measured against it")

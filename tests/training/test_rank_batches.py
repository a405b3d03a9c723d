"""Batches that ranks take alternately: each counts once, and all ranks get all losses in order."""

import numpy as np
import pytest
import torch

from tplr.errors import TrainingError
from tplr.training.parallel import SINGLE_PROCESS, SingleProcess
from tplr.training.rank_batches import all_losses, check_finite, own_batches


class Rank(SingleProcess):
    """One of several ranks; ``gathered`` is what all of them send."""

    def __init__(self, rank: int, size: int, gathered: list[bytes]) -> None:
        self.rank, self.size, self._gathered = rank, size, gathered

    def gather_bytes(self, data: bytes) -> list[bytes]:
        assert data == self._gathered[self.rank]
        return self._gathered


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9])
def test_every_batch_counts_once_and_the_losses_are_in_order(size: int) -> None:
    batches = np.arange(7 * 2 * 3).reshape(7, 2, 3)
    gathered: list[bytes] = []
    ranks = [Rank(rank, size, gathered) for rank in range(size)]
    own = [list(own_batches(batches, one)) for one in ranks]
    assert {len(taken) for taken in own} == {-(-7 // size)}  # every rank takes part in every round
    counted = [int(batch[0, 0]) // 6 for taken in own for batch, counts in taken if counts]
    assert sorted(counted) == [*range(7)]
    losses = [[torch.tensor(batch[:, 0]).double() for batch, _ in taken] for taken in own]
    gathered += [torch.cat(found).numpy().tobytes() for found in losses]
    for one, found in zip(ranks, losses, strict=True):
        assert all_losses(found, batches, one).tolist() == batches[:, :, 0].ravel().tolist()


def test_a_pass_ends_between_two_batches() -> None:
    stops = iter([False, False, True])
    taken = own_batches(np.zeros((7, 2, 3)), SINGLE_PROCESS, lambda: next(stops))
    assert len([next(taken), next(taken)]) == 2
    with pytest.raises(TrainingError, match="about to end"):
        next(taken)


def test_no_batches_and_losses_that_are_not_finite() -> None:
    with pytest.raises(ValueError, match="no batches"):
        next(own_batches(np.empty((0, 2, 3)), SINGLE_PROCESS))
    check_finite(np.array([1.0]))
    with pytest.raises(TrainingError, match="no update can be measured"):
        check_finite(np.array([1.0, np.nan]))

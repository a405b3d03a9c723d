"""The schedule against golden values and PyTorch's own schedulers."""

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LinearLR, SequentialLR

from tplr.hparams import LearningRate, OuterRate, SparselocoParams
from tplr.training.schedule import learning_rate, outer_learning_rate


def schedule(**changes) -> LearningRate:
    documented = {"peak": 4e-4, "warmup_steps": 250, "t_max": 20000, "start_factor": 0.1, "floor_factor": 0.1}
    return LearningRate(**documented | changes)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 4.0e-5),
        (125, 2.2e-4),
        (250, 4.0e-4),
        (250 + 5_000, 3.472792206135785e-4),
        (250 + 10_000, 2.2e-4),
        (250 + 20_000 - 1, 4.000000222066094e-5),
        (250 + 20_000, 4.0e-4),
        (250 + 40_000, 2.2e-4),
        (250 + 60_000, 4.0e-4),
        (250 + 100_000, 2.2e-4),
        (250 + 140_000, 4.0e-4),
    ],
)
def test_documented_values(step, expected):
    assert learning_rate(step, schedule()) == pytest.approx(expected, rel=1e-9)


def test_the_outer_rate_is_linear_between_points_and_constant_after_the_last_one():
    points = (OuterRate(step=64, rate=2.8), OuterRate(step=500, rate=1.5))
    constants = SparselocoParams.model_construct(outer_learning_rate=1.5, outer_learning_rate_points=points)
    assert [outer_learning_rate(step, constants) for step in (0, 64, 500, 10**9)] == [1.5, 2.8, 1.5, 1.5]
    found = [outer_learning_rate(step, constants) for step in range(0, 600, 7)]
    assert found == pytest.approx(np.interp(range(0, 600, 7), [0, 64, 500], [1.5, 2.8, 1.5]), rel=1e-12)


@pytest.mark.parametrize("warmup_steps", [5, 1])
def test_every_step_is_that_of_the_documented_schedulers(warmup_steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    reference = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, start_factor=0.1, end_factor=1.0, total_iters=warmup_steps),
            CosineAnnealingWarmRestarts(optimizer, T_0=7, T_mult=2, eta_min=0.03),
        ],
        milestones=[warmup_steps],
    )
    for step in range(120):
        got = learning_rate(step, schedule(peak=0.3, warmup_steps=warmup_steps, t_max=7))
        assert got == pytest.approx(reference.get_last_lr()[0], rel=1e-12), step
        optimizer.step()
        reference.step()


def test_no_warmup_starts_at_the_peak():
    assert learning_rate(0, schedule(peak=1.0, warmup_steps=0)) == 1.0

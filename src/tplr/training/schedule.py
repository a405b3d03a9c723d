"""Learning rates as functions of the step."""

import math

from tplr.hparams import LearningRate, SparselocoParams


def learning_rate(step: int, schedule: LearningRate) -> float:
    """Return the rate: linear warm-up from ``start_factor * peak`` to ``peak`` in ``warmup_steps``, then cosine cycles.

    A cycle goes from ``peak`` to ``floor_factor * peak``. The first takes ``t_max`` steps, each further cycle twice as
    many as the previous one.

    Args:
        step: number of steps since the start of the run, from 0.
    """
    if step < schedule.warmup_steps:
        return schedule.peak * (schedule.start_factor + (1 - schedule.start_factor) * step / schedule.warmup_steps)
    after, floor = step - schedule.warmup_steps, schedule.floor_factor
    cycle = (after // schedule.t_max + 1).bit_length() - 1
    progress = (after - schedule.t_max * (2**cycle - 1)) / (schedule.t_max * 2**cycle)
    return schedule.peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def outer_learning_rate(step: int, constants: SparselocoParams) -> float:
    """Return SparseLoCo's outer rate at an outer step: piecewise linear, see ``SparselocoParams``.

    All nodes must apply the same step: these operations round alike on every machine, which a cosine need not do.
    """
    begin, rate = 0, constants.outer_learning_rate
    for point in constants.outer_learning_rate_points:
        if step < point.step:
            return rate + (point.rate - rate) * ((step - begin) / (point.step - begin))
        begin, rate = point.step, point.rate
    return rate

"""The learning rate as a function of the step."""

import math

from tplr.hparams import LearningRate


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

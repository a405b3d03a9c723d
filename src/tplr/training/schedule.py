"""The learning rate as a function of the step."""

import math

START = 0.1
FLOOR = 0.1


def learning_rate(step: int, *, peak: float, warmup_steps: int, t_max: int) -> float:
    """Linear from ``START * peak`` to ``peak`` over ``warmup_steps``, then cosine cycles down to ``FLOOR * peak``.

    The first cycle takes ``t_max`` steps, each further one twice as long as the one before; each begins at ``peak``.

    Args:
        step: windows since the start of the run, from 0.
    """
    if step < warmup_steps:
        return peak * (START + (1 - START) * step / warmup_steps)
    after = step - warmup_steps
    cycle = (after // t_max + 1).bit_length() - 1
    progress = (after - t_max * (2**cycle - 1)) / (t_max * 2**cycle)
    return peak * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2)

"""How ranks share one order of samples: rank ``r`` of ``W`` takes positions ``r``, ``r + W``, ``r + 2 W``, …

What all ranks have consumed together is then always the beginning of the order, so a run may resume with another number
of ranks. Used by pipelines (``Order.share``, ``stride``) and by the stores' sampler.
"""

from tplr.errors import StateError


def check_stride(interval: int, offset: int) -> None:
    """Raises ValueError if ``offset`` is not in ``[0, interval)``."""
    if not 0 <= offset < interval:
        raise ValueError(f"stride: expected interval > 0 and 0 <= offset < interval, got {interval} and {offset}")


def per_rank(consumed: int, world: int) -> int:
    """Samples that each rank has consumed when all ``world`` ranks together have consumed ``consumed``.

    Raises:
        StateError: ``world`` does not divide it.
    """
    share, rest = divmod(consumed, world)
    if rest:
        raise StateError(
            f"the state was saved after {consumed} samples, which can't be divided among {world} ranks: resume with a "
            f"number of ranks that divides it"
        )
    return share

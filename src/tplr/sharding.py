"""Distributes one order of samples over ranks: rank ``r`` of ``W`` takes positions ``r``, ``r + W``, ``r + 2 W``, …

So the samples that all ranks have consumed are always a prefix of the order, and a run may resume with another number
of ranks. Used by pipelines (``Order.share``, ``stride``, ``shard_by_rank``) and by the stores' sampler.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tplr.errors import StateError

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Share:
    """Part ``index`` of ``count`` parts of the data: the part of one rank, or of one worker of a rank's DataLoader."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index} of {self.count}"

    def of(self, items: Sequence[T]) -> list[T]:
        """Return every ``count``-th item from ``index`` on."""
        return [*items[self.index :: self.count]]

    def split(self, index: int, count: int) -> "Share":
        """Return part ``index`` of ``count`` parts of this part."""
        return Share(self.index * count + index, self.count * count)


def check_stride(interval: int, offset: int) -> None:
    """Raise ValueError if ``offset`` is not in ``[0, interval)``."""
    if not 0 <= offset < interval:
        raise ValueError(f"stride: expected interval > 0 and 0 <= offset < interval, got {interval} and {offset}")


def per_rank(consumed: int, world: int) -> int:
    """Return the number of samples per rank if all ``world`` ranks together have consumed ``consumed``.

    Raises:
        StateError: ``world`` does not divide ``consumed``.
    """
    share, rest = divmod(consumed, world)
    if rest:
        raise StateError(
            f"the state was saved after {consumed} samples, which can't be divided among {world} ranks: resume with a "
            f"number of ranks that divides it"
        )
    return share

"""The ranks that train one miner's model together, as the training loops see them; one process is a team of one.

Loops are written once, for both. A collective begins with a status word, so that ranks which failed, or have no time
left, are never waited for (``sharded.py``).
"""

from typing import Protocol

import torch


class ParallelContext(Protocol):
    """Every method but ``local`` is called by all ranks in the same order."""

    rank: int
    size: int

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank. Raises ``TrainingError`` if a rank has failed."""
        ...

    def total(self, number: float) -> float:
        """The sum over all ranks."""
        ...

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """A sharded tensor, put together; the caller's own."""
        ...

    def part(self, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """This rank's part of rank 0's ``whole``, sharded as ``like`` is; the other ranks' is not looked at."""
        ...

    def local(self, part: torch.Tensor) -> torch.Tensor:
        """The entries of a sharded tensor that lie here."""
        ...


class SingleProcess:
    """One process, whose tensors are whole."""

    rank = 0
    size = 1

    def any(self, flag: bool) -> bool:
        """See ``ParallelContext``."""
        return flag

    def total(self, number: float) -> float:
        """See ``ParallelContext``."""
        return number

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """See ``ParallelContext``."""
        return part

    def part(self, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """See ``ParallelContext``."""
        assert whole is not None, f"rank 0 gives the whole, of shape {tuple(like.shape)}"
        return whole

    def local(self, part: torch.Tensor) -> torch.Tensor:
        """See ``ParallelContext``."""
        return part


SINGLE_PROCESS = SingleProcess()

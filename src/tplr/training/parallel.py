"""The ranks that train one miner's model together, as the training loops see them; a single process is one rank.

Every collective begins with a status word, so no rank waits for one that failed or is out of time (``sharded.py``).
"""

from typing import Protocol

import torch


class ParallelContext(Protocol):
    """Collectives over the ranks. All ranks call every method but ``to_local`` in the same order.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
    """

    rank: int
    size: int

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank. Raises ``TrainingError`` if a rank has failed."""
        ...

    def sum(self, number: float) -> float:
        """The sum of ``number`` over all ranks."""
        ...

    def full_tensor(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of a sharded tensor; the caller owns it."""
        ...

    def distribute(self, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """This rank's shard of rank 0's ``whole``, sharded as ``like``; other ranks' ``whole`` is not read."""
        ...

    def to_local(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's entries of a sharded tensor."""
        ...


class SingleProcess:
    """One process with whole tensors."""

    rank = 0
    size = 1

    def any(self, flag: bool) -> bool:
        """See ``ParallelContext``."""
        return flag

    def sum(self, number: float) -> float:
        """See ``ParallelContext``."""
        return number

    def full_tensor(self, part: torch.Tensor) -> torch.Tensor:
        """See ``ParallelContext``."""
        return part

    def distribute(self, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """See ``ParallelContext``."""
        assert whole is not None, f"rank 0 gives the whole, of shape {tuple(like.shape)}"
        return whole

    def to_local(self, part: torch.Tensor) -> torch.Tensor:
        """See ``ParallelContext``."""
        return part


SINGLE_PROCESS = SingleProcess()

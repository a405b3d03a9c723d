"""The ranks that hold one model together, as training code sees them; a single process is one rank.

Over several ranks, each has a shard of every parameter: rows ``[ceil(n / N) * rank, ceil(n / N) * (rank + 1))`` of its
n rows. Work on whole tensors is divided: each tensor has one rank that gets it whole (``gather``), works on it and
gives it back (``scatter``). All ranks call the methods of ``ParallelContext`` in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch.distributed.tensor import DTensor

from tplr.errors import StateError, TplrError, TrainingError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What one rank alone can find wrong in data: all ranks then raise it (``together``).
_SHARED_ERRORS: dict[str, type[TplrError]] = {one.__name__: one for one in (StateError, TrainingError)}


class ParallelContext(Protocol):
    """Collectives over the ranks. All ranks call every method in the same order.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
    """

    rank: int
    size: int

    def shard(self, model: PreTrainedModel, *, gather_bfloat16: bool = False) -> PreTrainedModel:
        """Make a model's parameters shards, layer by layer; they may be on the meta device.

        Args:
            gather_bfloat16: a layer computes with its float32 weights rounded to bfloat16.
        """
        ...

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        ...

    def sum(self, number: float) -> float:
        """The sum of ``number`` over all ranks."""
        ...

    def gather(self, shards: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Rank ``i`` gets the tensor of ``shards[i]`` whole; None where that is None. All ranks give the same tensors.

        A single process gets the tensor itself, not a copy.
        """
        ...

    def scatter(self, whole: torch.Tensor | None, shards: Sequence[torch.Tensor | None]) -> None:
        """The inverse of ``gather``: each rank's ``whole`` is written into the shards of all ranks."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank."""
        ...


class SingleProcess:
    """See ``ParallelContext``: one process with whole tensors."""

    rank = 0
    size = 1

    def shard(self, model: PreTrainedModel, *, gather_bfloat16: bool = False) -> PreTrainedModel:
        return model

    def any(self, flag: bool) -> bool:
        return flag

    def sum(self, number: float) -> float:
        return number

    def gather(self, shards: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        return None if shards[0] is None else shards[0].detach()

    def scatter(self, whole: torch.Tensor | None, shards: Sequence[torch.Tensor | None]) -> None:
        """Nothing: ``whole`` is the tensor itself."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


SINGLE_PROCESS = SingleProcess()


def rank_rows(rows: int, rank: int, size: int) -> slice:
    """The rows that ``rank`` of ``size`` has of a tensor, by FSDP's rule; the last ranks may have none."""
    each = -(-rows // size)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """This rank's rows of a tensor, as a view, and which they are; a plain tensor is whole."""
    if not isinstance(tensor, DTensor):
        return tensor, slice(0, len(tensor) if tensor.dim() else 1)
    mesh = tensor.device_mesh
    return tensor.to_local(), rank_rows(len(tensor), mesh.get_local_rank(), mesh.size())


@contextmanager
def together(parallel: ParallelContext) -> Iterator[None]:
    """A StateError or TrainingError that one rank raises within is raised by all ranks at the end of the block.

    No rank may call another collective within.
    """
    problem: TplrError | None = None
    try:
        yield
    except tuple(_SHARED_ERRORS.values()) as error:
        problem = error
    texts = parallel.gather_bytes(f"{type(problem).__name__}\n{problem}".encode() if problem else b"")
    if problem:
        raise problem
    for text in filter(None, texts):
        name, message = text.decode().split("\n", 1)
        raise _SHARED_ERRORS[name](message)

"""shard_by_rank: each rank, and each worker of its DataLoader, reads its own part of the sources."""

from typing import Any

from tplr.config import Environment
from tplr.sharding import Share
from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform


class ShardByRank(Transform):
    """This process's share of every preceding source: every ``world_size``-th file, row group, page or item.

    Args:
        rank, world_size: None reads ``RANK`` and ``WORLD_SIZE`` when an iteration begins.

    Raises:
        ValueError: a source can't be divided, or is shared already.
    """

    keeps = False

    def __init__(self, source: Transform, rank: int | None, world_size: int | None) -> None:
        self.sources = (source,)
        self.rank, self.world_size = rank, world_size
        if rank is not None and world_size is not None:
            _checked(rank, world_size)
        _check_divisible(source)

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return self.sources[0].open(context, state)

    def share(self) -> Share:
        environment = Environment.read()
        rank = environment.rank if self.rank is None else self.rank
        return _checked(rank, environment.world_size if self.world_size is None else self.world_size)

    def describe(self, *, pinned: bool) -> str:
        return "shard_by_rank"


def _checked(rank: int, world_size: int) -> Share:
    if not 0 <= rank < world_size:
        raise ValueError(
            f"shard_by_rank: expected 0 <= rank < world_size, got {rank} and {world_size}: give both, or set RANK and "
            f"WORLD_SIZE"
        )
    return Share(rank, world_size)


def _check_divisible(transform: Transform) -> None:
    if isinstance(transform, ShardByRank):
        raise ValueError("shard_by_rank: the dataset is already shared between ranks")
    if not transform.divisible:
        raise ValueError(
            f"shard_by_rank: {transform.describe(pinned=False)} can't be divided without reading all of it on each "
            f"rank: use stride(world_size, rank), or give each rank its own data"
        )
    for source in transform.sources:
        _check_divisible(source)

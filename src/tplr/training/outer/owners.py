"""Assigns each tensor to the rank that works on it whole, and orders the work over all ranks."""

import itertools
from collections.abc import Iterator, Mapping

import torch

from tplr.compress.layout import PayloadSpec
from tplr.compress.tensor_groups import TensorGroup, tensor_groups
from tplr.training.local import Stop
from tplr.training.parallel import ParallelContext
from tplr.training.rank_batches import check_stopped


class TensorOwners:
    """The owner of each tensor of a run: the rank that keeps its error feedback and takes its outer step.

    Attributes:
        of_rank: for each rank, the names of the tensors that it owns.
    """

    def __init__(self, spec: PayloadSpec, device: torch.device, parallel: ParallelContext) -> None:
        sizes = {name: one.grid.rows * one.grid.cols for name, one in spec.tensors.items()}
        owners = assign_owners(sizes, parallel.size)
        self.of_rank = [[name for name in spec.tensors if owners[name] == rank] for rank in range(parallel.size)]
        self._spec = spec
        self._device = device
        self._parallel = parallel

    @property
    def mine(self) -> list[str]:
        """The names of the tensors that this rank owns."""
        return self.of_rank[self._parallel.rank]

    def groups(self, rank: int) -> Iterator[TensorGroup]:
        """Yield the groups of the tensors that a rank owns."""
        return tensor_groups(self._spec, self._device, self.of_rank[rank])

    def whole(
        self, shards: Mapping[str, torch.Tensor], *, write_back: bool = False, stop: Stop | None = None
    ) -> Iterator[tuple[TensorGroup, dict[str, torch.Tensor]]]:
        """Yield each group of this rank with its whole tensors; all ranks process their groups at the same time.

        A collective: every rank must iterate to the end. A single process gets the tensors themselves.

        Args:
            shards: of all tensors, by name.
            write_back: the caller changes the whole tensors in place, and the changes are written to the shards.
            stop: called before the groups are gathered; if True on any rank, all ranks end.

        Raises:
            TrainingError: ended by ``stop``.
        """
        rank = self._parallel.rank
        for groups in itertools.zip_longest(*map(self.groups, range(self._parallel.size))):
            if stop is not None:
                check_stopped(stop(), self._parallel)
            names = [[one.name for one in group.tensors] if group else [] for group in groups]
            rounds = [
                [None if name is None else shards[name] for name in of_ranks]
                for of_ranks in itertools.zip_longest(*names)
            ]
            whole = [self._parallel.gather(one) for one in rounds]
            if groups[rank]:
                mine = zip(names[rank], whole, strict=False)  # other ranks' groups may have more tensors
                tensors = {name: one for name, one in mine if one is not None}
                yield groups[rank], tensors
                tensors.clear()  # frees them before the next ones are gathered; the caller still has the dictionary
            while whole:
                tensor, shard = whole.pop(), rounds.pop()
                if write_back:
                    self._parallel.scatter(tensor, shard)
                del tensor


def assign_owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the owner rank by name. Tensors go, by falling size, to the rank with the fewest entries; ties by name."""
    owners, entries = {}, [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = entries.index(min(entries))
        entries[owners[name]] += sizes[name]
    return owners

"""``ResumableDistributedSampler``: the indices of one rank, resumable at any position, in constant memory.

An epoch is one order of all items, the same for every world size. Ranks share it by the rule of ``tplr.sharding``, so a
run may resume with another number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sized
from operator import index
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from tplr.errors import StateError
from tplr.permutation import Permutation
from tplr.sharding import per_rank

Order = Literal["portable", "torch"]
Places = npt.NDArray[np.int64]

_VERSION = 1
_MAX_EPOCH = 1 << 32
_MAX_CONSUMED = 1 << 62
_BLOCK = 4096  # indices computed at a time


class ResumableDistributedSampler(Sampler[int]):
    """Indices of ``data_source`` for one rank. Each ``iter`` yields one epoch, or its rest from the start position.

    The start position is that of the constructor or of a loaded state, then the begin of the epoch after each finished
    one. A pass that was broken off begins there again, because its loader may have read further than was used:
    ``load_state_dict(state_dict(consumed, epoch))`` continues it instead. Without that, the next epoch follows if the
    loader had read this one to its end.

    Attributes:
        epoch, iter: the position; ``iter`` counts this rank's samples of the epoch. A loader with workers reads ahead,
            so the position is ahead of the training: see ``state_dict``.

    Args:
        start_iter: number of this rank's samples already taken in ``start_epoch``; may exceed an epoch.
        drop_last: leave out the items that do not fill every rank's share; otherwise the order's first items fill it.
        process_group: the ranks that share the items; default all of ``torch.distributed``, or one rank without it.
        rank, world_size: override the process group's.
        order: ``portable``, by ``tplr.permutation``; or ``torch``: ``randperm`` of ``seed + epoch``, which holds the
            whole order in memory and may differ between versions of torch.

    Raises:
        ValueError: a rank would have no sample, or a number is out of range.
    """

    def __init__(  # noqa: PLR0917 - callers pass these by position
        self,
        data_source: Sized,
        start_epoch: int = 0,
        start_iter: int = 0,
        seed: int = 42,
        drop_last: bool = False,
        shuffle: bool = True,
        process_group: dist.ProcessGroup | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        order: Order = "portable",
    ) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank(process_group) if grouped else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size(process_group) if grouped else 1
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        if order not in ("portable", "torch"):
            raise ValueError(f"order {order!r}: expected portable or torch")
        if start_epoch < 0 or start_iter < 0:
            raise ValueError(f"start_epoch {start_epoch}, start_iter {start_iter}: expected 0 or more")
        self._length = len(data_source)
        self._share = self._length // self.world_size if drop_last else -(-self._length // self.world_size)
        if not self._share:
            remedy = "; use fewer ranks or drop_last=False" if self._length else ""
            raise ValueError(f"{self._length} items are fewer than {self.world_size} ranks{remedy}")
        self._rules = {"length": self._length, "seed": seed, "drop_last": drop_last, "shuffle": shuffle, "order": order}
        self.epoch = start_epoch + start_iter // self._share
        self.iter = self._start = start_iter % self._share
        # Epoch of the last ``iter``: a loader reads an epoch to its end ahead of the training.
        self._last_read = self.epoch

    def __len__(self) -> int:
        """Number of samples left in this epoch for this rank; after its end those of the next."""
        return self._share - self.iter % self._share

    def __iter__(self) -> Iterator[int]:
        self._finish_epoch()
        self._last_read = self.epoch
        self.iter = self._start
        look_up = self._order()
        while self.iter < self._share:
            places = np.arange(self.iter, min(self.iter + _BLOCK, self._share)) * self.world_size + self.rank
            for item in look_up(places % self._length).tolist():
                self.iter += 1
                yield item
        self._finish_epoch()

    def state_dict(self, consumed: int | None = None, epoch: int | None = None) -> dict[str, Any]:
        """The position, for any world size.

        Args:
            consumed: number of samples of this epoch that all ranks together have trained on, also if a loader has
                read all of it already. Default: the number returned, which is more while a loader reads ahead.
            epoch: the epoch of ``consumed``. Default: that of the last pass; but 0 samples of a pass that a loader has
                read to its end count as the begin of the next epoch.

        Raises:
            ValueError: all ranks together can't have trained on so many samples of an epoch, or ``epoch`` is not that
                of the last pass or of the next one.
        """
        done = self.iter * self.world_size if consumed is None else index(consumed)
        whole = self._share * self.world_size
        if not 0 <= done <= whole or done % self.world_size:
            raise ValueError(
                f"consumed {done}: expected the samples of all {self.world_size} ranks together, which take equally "
                f"many: a multiple of {self.world_size} from 0 to {whole}"
            )
        if epoch is None:
            epoch = self._last_read if consumed else self.epoch
        elif consumed is None or epoch not in (self._last_read, self.epoch):
            raise ValueError(
                f"epoch {epoch} with consumed {consumed}: expected the number of samples of epoch {self._last_read}"
                + (f" or {self.epoch}" if self.epoch != self._last_read else "")
            )
        return {"version": _VERSION, "epoch": index(epoch), "consumed": done, **self._rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position to that of ``state``.

        Raises:
            StateError: it is damaged, belongs to other data or another order, or this number of ranks does not divide
                its samples. The position is as it was.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"a sampler's state: expected a dictionary, got {type(state).__name__}")
        expected = {"version": _VERSION, **self._rules}
        if set(state) != {*expected, "epoch", "consumed"}:
            raise StateError(
                f"a sampler's state with the keys {', '.join(map(str, state))}: not a state of this version"
            )
        for name, value in expected.items():
            if state[name] != value:
                raise StateError(f"the sampler's state has {name} {state[name]!r}, this sampler {value!r}")
        # Without drop_last, repeated items fill the shares of any number of ranks, so any number is possible.
        most = self._length if self._rules["drop_last"] else _MAX_CONSUMED
        for name, high in (("epoch", _MAX_EPOCH), ("consumed", most)):
            number = state[name]
            if not isinstance(number, int | np.integer) or isinstance(number, bool) or not 0 <= number <= high:
                raise StateError(
                    f"the sampler's state has {name} {number!r}, expected a whole number from 0 to {high}: it is "
                    "damaged, use another state"
                )
        self.iter = per_rank(int(state["consumed"]), self.world_size)
        self.epoch = int(state["epoch"])
        self._start = self.iter
        self._finish_epoch()
        self._last_read = self.epoch

    def _finish_epoch(self) -> None:
        if self.iter >= self._share:
            self.epoch, self.iter, self._start = self.epoch + 1, 0, 0

    def _order(self) -> Callable[[Places], Places]:
        """A function from positions in this epoch to indices."""
        if not self._rules["shuffle"]:
            return lambda places: places
        if self._rules["order"] == "portable":
            return Permutation(self._length, self._rules["seed"], self.epoch).take
        generator = torch.Generator().manual_seed(self._rules["seed"] + self.epoch)
        return torch.randperm(self._length, generator=generator).numpy().__getitem__

"""The interface of a token store: each key as one stream of numbers, with the positions of its records."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch

from tplr.errors import DataError
from tplr.stores.prepared import check_prepared
from tplr.stores.token_stream import RecordOffsets, Segment, TokenStream, join_offsets


@dataclass(frozen=True)
class ShardKey:
    """One key of one shard.

    Attributes:
        offsets: start of each list of its records, then the total; None if the shard has no record positions.
        groups: the same for the lists of each record; None if a record is one list.
    """

    segments: Sequence[Segment]
    offsets: Sequence[int] | None
    groups: Sequence[int] | None = None


@dataclass(frozen=True)
class StoreShard:
    """A shard of a store, opened; ``where`` names it in errors."""

    where: str
    keys: Mapping[str, ShardKey]


class TokenStore(ABC):
    """Numbers by key, each key one stream over all shards. ``StoreFactory`` creates it, ``load`` opens the data.

    ``fetch`` and ``fetch_record`` may return the store's own memory: copy before you change it.
    """

    def __init__(self) -> None:
        self._streams: dict[str, TokenStream] = {}
        self._records: dict[str, RecordOffsets] = {}
        self._length = 0

    @abstractmethod
    def _shards(self, path: Path) -> list[StoreShard]:
        """Open the shards at ``path``, in order."""

    def load(self, path: str | Path, *, allow_incomplete: bool = False) -> None:
        """Open ``path``, a file or a folder of shards.

        Args:
            allow_incomplete: open the existing shards of a preparation that is not finished or lacks shards.

        Raises:
            DataError: a shard contradicts its meta or other shards, or a preparation is incomplete.
            FileNotFoundError: no file of this format.
        """
        if not allow_incomplete:
            check_prepared(Path(path))
        self._take(self._shards(Path(path)), str(path))

    def _take(self, shards: Sequence[StoreShard], where: str) -> None:
        if not shards or not shards[0].keys:
            raise FileNotFoundError(f"No supported data files in {where}: no shard with a key to load")
        first = shards[0]
        for shard in shards[1:]:
            if set(shard.keys) != set(first.keys):
                raise DataError(
                    f"{shard.where} has the keys {', '.join(shard.keys)}, {first.where} has {', '.join(first.keys)}: "
                    "load them separately"
                )
        self._streams = {key: _stream(key, shards) for key in first.keys}
        self._records = {key: found for key in first.keys if (found := _records(key, shards)) is not None}
        counts = {key: len(found) for key, found in self._records.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"{where}: its keys have different numbers of records: {counts}")
        self._length = min(map(len, self._streams.values()), default=0)

    @property
    def keys(self) -> list[str]:
        """The names of its keys."""
        self._check_loaded()
        return [*self._streams]

    def __len__(self) -> int:
        """Number of elements of the shortest key."""
        self._check_loaded()
        return self._length

    @property
    def token_count(self) -> int:
        """The same as ``len``."""
        return len(self)

    @property
    def num_records(self) -> int:
        """Number of records; 0 if the store has no record positions."""
        self._check_loaded()
        return min((len(found) for found in self._records.values()), default=0)

    def stream(self, key: str) -> TokenStream:
        """The stream of one key, which does not check bounds. Raises KeyError."""
        stream = self._streams.get(key)
        if stream is None:
            self._check_loaded()
            raise KeyError(f"no key {key!r}; available: {', '.join(self._streams)}")
        return stream

    @overload
    def fetch(self, begin: int, end: int, keys: str) -> torch.Tensor: ...

    @overload
    def fetch(self, begin: int, end: int, keys: list[str] | tuple[str, ...]) -> dict[str, torch.Tensor]: ...

    def fetch(
        self, begin: int, end: int, keys: str | list[str] | tuple[str, ...]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Elements ``[begin, end)`` of one key as a tensor, or of several keys as a dictionary of tensors.

        Raises:
            KeyError: no such key.
            RuntimeError: not loaded yet.
            ValueError: not ``0 <= begin <= end <= len`` with ``begin < len``.
        """
        if not 0 <= begin <= end <= self._length or begin == self._length:
            self._refuse(begin, end)
        if isinstance(keys, str):
            return torch.from_numpy(self.stream(keys).read(begin, end))
        return {key: torch.from_numpy(self.stream(key).read(begin, end)) for key in keys}

    def fetch_record(self, record: int, keys: Sequence[str]) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """One record's values of some keys: a tensor each, or a list of tensors where a record has several lists.

        Raises:
            DataError: the store has no record positions.
            IndexError: no such record; negative numbers count from the end.
            KeyError: no such key.
        """
        found: dict[str, torch.Tensor | list[torch.Tensor]] = {}
        for key in keys:
            stream, records = self.stream(key), self._records.get(key)
            if records is None:
                raise DataError(f"key {key!r} has no record offsets: prepare the store again to read it by records")
            if not -len(records) <= record < len(records):
                raise IndexError(f"record {record} of {len(records)}")
            lists = [torch.from_numpy(stream.read(*part)) for part in records.ranges(record % len(records))]
            found[key] = lists if records.nested else lists[0]
        return found

    def _check_loaded(self) -> None:
        if not self._streams:
            raise RuntimeError("Store not loaded: call load(path) first")

    def _refuse(self, begin: int, end: int) -> None:
        length = len(self)
        if end < begin:
            raise ValueError(f"fetch({begin}, {end}): expected begin <= end")
        raise ValueError(f"fetch({begin}, {end}) is out of bounds: the store has {length} elements")


def _stream(key: str, shards: Sequence[StoreShard]) -> TokenStream:
    segments = [segment for shard in shards for segment in shard.keys[key].segments]
    for shard in shards:
        for segment in shard.keys[key].segments:
            if segment.dtype != segments[0].dtype:
                raise DataError(
                    f"{shard.where}: key {key!r} holds {segment.dtype}, {shards[0].where} holds {segments[0].dtype}"
                )
    return TokenStream(segments)


def _records(key: str, shards: Sequence[StoreShard]) -> RecordOffsets | None:
    parts = [(found.offsets, found.groups) for shard in shards if (found := shard.keys[key])]
    if any(offsets is None for offsets, _ in parts) or len({groups is None for _, groups in parts}) > 1:
        return None
    return join_offsets([(offsets, groups) for offsets, groups in parts if offsets is not None])

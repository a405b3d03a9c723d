"""from_files: records of many files; several files are open at a time and are read in turn."""

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from tplr.errors import StateError
from tplr.logging import logger
from tplr.streams.epoch_shuffle import EpochShuffle
from tplr.streams.iterator import PipelineContext, State, StreamIterator, Transform
from tplr.streams.sources.records import FORMATS, FileFormat
from tplr.streams.sources.source_file import SourceFile, expand_pattern
from tplr.streams.sources.source_shard import SourceShard
from tplr.urls import Url, expand_braces


class FromFiles(Transform):
    """Reads one record from each of ``n_active_shards`` open files in turn.

    When a file ends, the next file joins at the end of the turn. Files of two epochs are never open together. The order
    of records depends only on the files, on ``n_active_shards`` and on ``seed``.

    Args:
        urls: one or several, with braces (``{00..99}``) and globs (``*``, ``**``; not with http).
        repeat: endless epochs; ends if an epoch has no record.
        shuffle_shards: the order of the files differs between epochs, as ``EpochShuffle`` says.
        format: ``auto`` takes it from the names. The suffixes ``.gz``, ``.bz2``, ``.xz`` and ``.zst`` always count.
        n_standby_shards: number of files that are fetched before they join.
        timeout: seconds of retries for a file that fails or does not answer.
        max_bad_fraction: largest share of records of a file that may be no JSON objects and are left out. It holds once
            100 records of a file were read, and at its end. A file without any usable record is always an error.
        n_prefetch_samples: 0 turns read-ahead of remote files off. Its unit is pieces, not records.

    A state holds for each open file the end of its last record, as a byte offset (JSONL, CBOR) or a row (parquet), and
    the file's ETag or size. A resume reads on from there. The offset in a compressed file is that of the decompressed
    data, so a resume reads the file again up to it.

    Raises:
        ValueError: ``repeat`` without a URL, or a number or the format is out of range.
    """

    def __init__(  # noqa: PLR0917
        self,
        urls: Url | Sequence[Url],
        repeat: bool,
        shuffle_shards: bool,
        format: FileFormat,  # noqa: A002 - the documented name
        n_active_shards: int,
        n_standby_shards: int,
        timeout: float,
        n_prefetch_samples: int,
        seed: int,
        max_bad_fraction: float,
    ) -> None:
        if format not in FORMATS:
            raise ValueError(f"from_files: format {format!r}; expected one of {', '.join(FORMATS)}")
        if n_active_shards < 1 or n_standby_shards < 0 or n_prefetch_samples < 0 or timeout <= 0:
            raise ValueError(
                f"from_files: expected n_active_shards and timeout above 0, and no negative number, got "
                f"{n_active_shards=}, {n_standby_shards=}, {n_prefetch_samples=}, {timeout=}"
            )
        if not 0 <= max_bad_fraction <= 1:
            raise ValueError(f"from_files: max_bad_fraction {max_bad_fraction}: expected a number from 0 to 1")
        self._given = expand_braces(urls)
        if repeat and not self._given:
            raise ValueError("from_files: no URL to repeat")
        self._expanded: list[str] | None = None
        self.repeat, self.shuffle_shards, self.seed = repeat, shuffle_shards, seed
        self.format: FileFormat = format
        self.n_active_shards, self.n_standby_shards = n_active_shards, n_standby_shards
        self.timeout = timeout
        self.ahead = n_prefetch_samples > 0
        self.max_bad_fraction = max_bad_fraction

    def urls(self, context: PipelineContext) -> list[str]:
        """All files; globs are expanded at the first call."""
        if self._expanded is None:
            self._expanded = [found for url in self._given for found in expand_pattern(context, url, self.timeout)]
        return self._expanded

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _FilesIterator(self, context, state)

    def describe(self, *, pinned: bool) -> str:
        files = hashlib.sha256("\n".join(self._given).encode()).hexdigest()[:16]
        shuffle = f", shuffle_shards({self.seed})" if self.shuffle_shards else ""
        return (
            f"from_files({len(self._given)} urls {files}, {self.format}, {self.n_active_shards} active"
            f"{', repeat' if self.repeat else ''}{shuffle})"
        )


class _FilesIterator(StreamIterator[dict[str, Any]]):
    """Counts ``bad_records``."""

    def __init__(self, transform: FromFiles, context: PipelineContext, state: State | None) -> None:
        super().__init__()
        self._transform = transform
        self._context = context
        self._urls = transform.urls(context)
        files = hashlib.sha256("\n".join(self._urls).encode()).hexdigest()
        self._files = files
        if state and state["files"] != files:
            raise StateError("from_files: the patterns match other files than when the state was saved")
        self._shuffle = EpochShuffle(len(self._urls), transform.seed if transform.shuffle_shards else None)
        self._epoch, self._next = 0, 0  # the next file to join
        self._records = 0  # of this epoch; an epoch without any is the last
        self._active: deque[tuple[int, SourceShard]] = deque()  # file's number, file
        self._standby: deque[tuple[int, SourceShard]] = deque()
        if state:
            self._epoch, self._next = state["next"]
            self._records = state["records"]
            self.counts = dict(state["counts"])
            self._active.extend((number, self._shard(number, one)) for number, one in state["active"])
        self._order = self._shuffle.order(self._epoch)
        self._fill()

    def __next__(self) -> dict[str, Any]:
        active = self._active
        while True:
            if not active and not self._next_epoch():
                raise StopIteration
            shard = active[0][1]
            bad = shard.bad
            try:
                record = shard.read()
            except StopIteration:
                shard.close()
                active.popleft()
                self._fill()
                continue
            finally:
                if shard.bad != bad:
                    self.counts["bad_records"] = self.counts.get("bad_records", 0) + shard.bad - bad
            active.rotate(-1)
            self._records += 1
            return record

    def state(self) -> State:
        return {
            "files": self._files,
            "next": [self._epoch, self._next],
            "records": self._records,
            "active": [[number, shard.state()] for number, shard in self._active],
            "counts": dict(self.counts),
        }

    def report(self) -> dict[str, int]:
        """``counts``, the epoch, and its files."""
        ended = self._next - len(self._active)
        return {**self.counts, "epoch": self._epoch, "files": len(self._urls), "files_ended": ended}

    def close(self) -> None:
        for _, shard in (*self._active, *self._standby):
            shard.close()

    def _next_epoch(self) -> bool:
        if not self._transform.repeat:
            return False
        if not self._records:
            logger.warning("from_files: an epoch had no record in any of its %d files; it is the last", len(self._urls))
            return False
        self._epoch, self._next, self._records = self._epoch + 1, 0, 0
        self._order = self._shuffle.order(self._epoch)
        self._fill()
        return True

    def _fill(self) -> None:
        """Activate files up to ``n_active_shards``, and prepare the standby files."""
        while self._next < len(self._order) and len(self._active) < self._transform.n_active_shards:
            number = self._order[self._next]
            self._active.append(self._standby.popleft() if self._standby else (number, self._shard(number)))
            self._next += 1
        last = min(self._next + self._transform.n_standby_shards, len(self._order))
        for place in range(self._next + len(self._standby), last):
            self._standby.append((self._order[place], self._shard(self._order[place])))

    def _shard(self, number: int, state: State | None = None) -> SourceShard:
        transform = self._transform
        file = SourceFile(self._context, self._urls[number], transform.timeout, ahead=transform.ahead)
        shard = SourceShard(file, transform.format, transform.max_bad_fraction, state)
        if transform.ahead:
            shard.prepare()
        return shard

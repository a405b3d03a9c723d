"""from_files: records of many files, a few of them read in turn."""

import hashlib
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from tplr.errors import StateError
from tplr.logging import logger
from tplr.streams.iterator import Flow, Run, State, Step
from tplr.streams.sources.records import FORMATS, FileFormat
from tplr.streams.sources.shard import Shard
from tplr.urls import expand_braces, is_pattern, local_matches, scheme_of


class FromFiles(Step):
    """``n_active_shards`` files are open, and give one record each in turn; when one ends, the next file joins at the
    end of the turn. Files of two epochs are never open together. So the order of records depends on the files, on
    ``n_active_shards`` and on ``seed``, and on nothing else.

    Args:
        urls: one or several, with braces (``{00..99}``) and globs (``*``, ``**``; on disk and in buckets).
        repeat: epoch after epoch; ends if one has no record.
        shuffle_shards: one ``random.Random(seed)`` shuffles the same list of files again for each epoch.
        file_format: by the names if ``auto``; ``.gz``, ``.bz2``, ``.xz`` and ``.zst`` at their end in any case.
        n_standby_shards: so many files are fetched before their turn comes.
        timeout: seconds that a file which fails or does not answer is tried again.
        n_prefetch_samples: 0 keeps files far away from being fetched ahead; they come in pieces, not in records.

    A state holds for each open file where its last record ended: a byte offset (JSONL, CBOR) or a row (parquet),
    and the file's ETag or size. From there a resume reads on. In compressed files it has to read up to there again,
    the offset being that of the decompressed data.

    Raises:
        ValueError: there is no URL to repeat, or a number or the format makes no sense.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        repeat: bool,
        shuffle_shards: bool,
        format: FileFormat,  # noqa: A002 - the documented name
        n_active_shards: int,
        n_standby_shards: int,
        timeout: float,
        n_prefetch_samples: int,
        seed: int,
    ) -> None:
        if format not in FORMATS:
            raise ValueError(f"from_files: format {format!r}; expected one of {', '.join(FORMATS)}")
        if n_active_shards < 1 or n_standby_shards < 0 or n_prefetch_samples < 0 or timeout <= 0:
            raise ValueError(
                f"from_files: expected n_active_shards and timeout above 0, and no negative number, got "
                f"{n_active_shards=}, {n_standby_shards=}, {n_prefetch_samples=}, {timeout=}"
            )
        self._given = expand_braces(urls)
        if repeat and not self._given:
            raise ValueError("from_files: no URL to repeat")
        self._expanded: list[str] | None = None
        self.repeat, self.shuffle_shards, self.seed = repeat, shuffle_shards, seed
        self.format: FileFormat = format
        self.n_active_shards, self.n_standby_shards = n_active_shards, n_standby_shards
        self.timeout = timeout
        self.ahead = n_prefetch_samples > 0

    def urls(self, run: Run) -> list[str]:
        """All files, globs looked up the first time."""
        if self._expanded is None:
            found = []
            for url in self._given:
                if not is_pattern(url):
                    found.append(url)
                elif scheme_of(url) == "file":
                    found += local_matches(url)
                else:
                    from tplr.storage.blocking import BucketConnections

                    found += run.shared(BucketConnections).matches(url, self.timeout)
            self._expanded = found
        return self._expanded

    def open(self, run: Run, state: State | None = None) -> Flow[Any]:
        return _FilesFlow(self, run, state)

    def describe(self, *, pinned: bool) -> str:
        files = hashlib.sha256("\n".join(self._given).encode()).hexdigest()[:16]
        shuffle = f", shuffle_shards({self.seed})" if self.shuffle_shards else ""
        return (
            f"from_files({len(self._given)} urls {files}, {self.format}, {self.n_active_shards} active"
            f"{', repeat' if self.repeat else ''}{shuffle})"
        )


class _FilesFlow(Flow[dict[str, Any]]):
    """Counts ``bad_records``."""

    def __init__(self, step: FromFiles, run: Run, state: State | None) -> None:
        super().__init__()
        self._step = step
        self._run = run
        self._urls = step.urls(run)
        files = hashlib.sha256("\n".join(self._urls).encode()).hexdigest()
        self._files = files
        if state and state["files"] != files:
            raise StateError("from_files: the patterns match other files than when the state was saved")
        self._random = random.Random(step.seed)
        self._order = list(range(len(self._urls)))
        self._shuffled = -1  # the epoch that the order was last shuffled for
        self._epoch, self._next = 0, 0  # the next file to join
        self._records = 0  # of this epoch; an epoch without any is the last
        self._active: deque[tuple[int, Shard]] = deque()  # file's number, file
        self._standby: deque[tuple[int, Shard]] = deque()
        if state:
            self._epoch, self._next = state["next"]
            self._records = state["records"]
            self.counts = dict(state["counts"])
            self._shuffle()
            self._active.extend((number, self._shard(number, one)) for number, one in state["active"])
        else:
            self._shuffle()
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
        """Beside the counts: how far this epoch has come."""
        ended = self._next - len(self._active)
        return {**self.counts, "epoch": self._epoch, "files": len(self._urls), "files_ended": ended}

    def close(self) -> None:
        for _, shard in (*self._active, *self._standby):
            shard.close()

    def _next_epoch(self) -> bool:
        if not self._step.repeat:
            return False
        if not self._records:
            logger.warning("from_files: an epoch had no record in any of its %d files; it is the last", len(self._urls))
            return False
        self._epoch, self._next, self._records = self._epoch + 1, 0, 0
        self._shuffle()
        self._fill()
        return True

    def _shuffle(self) -> None:
        while self._step.shuffle_shards and self._shuffled < self._epoch:
            self._random.shuffle(self._order)
            self._shuffled += 1

    def _fill(self) -> None:
        """Let files join until enough are active, and get the next ones ready."""
        while self._next < len(self._order) and len(self._active) < self._step.n_active_shards:
            number = self._order[self._next]
            self._active.append(self._standby.popleft() if self._standby else (number, self._shard(number)))
            self._next += 1
        last = min(self._next + self._step.n_standby_shards, len(self._order))
        for place in range(self._next + len(self._standby), last):
            self._standby.append((self._order[place], self._shard(self._order[place])))

    def _shard(self, number: int, state: State | None = None) -> Shard:
        shard = Shard(
            self._run,
            self._urls[number],
            self._step.format,
            timeout=self._step.timeout,
            ahead=self._step.ahead,
            state=state,
        )
        if self._step.ahead:
            shard.prepare()
        return shard

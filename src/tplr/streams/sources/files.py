"""from_files: records of many files; several files are open at a time and are read alternately."""

import contextlib
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from tplr.errors import StateError
from tplr.logging import logger
from tplr.sharding import Share
from tplr.streams.epoch_shuffle import EpochShuffle
from tplr.streams.iterator import Part, PipelineContext, State, StreamIterator, Transform, divided_counts
from tplr.streams.shared_places import Former, SharedPlaces, divide_places
from tplr.streams.sources.records import FORMATS, FileFormat, format_of
from tplr.streams.sources.source_file import SourceFile, expand_pattern
from tplr.streams.sources.source_shard import SourceShard
from tplr.streams.state import StateReader
from tplr.urls import Url, expand_braces, relative_names, version_of_copy


class FromFiles(Transform):
    """Reads one record from each of ``n_active_shards`` open files in each round.

    When a file ends, the next file joins at the end of the round. Files of two epochs are never open together. The
    order of records depends only on the files, on ``n_active_shards`` and on ``seed``.

    Args:
        urls: one or several, with braces (``{00..99}``) and globs (``*``, ``**``; not with http).
        repeat: endless epochs; ends if the files (in order: those of this share) have no record.
        shuffle_shards: the order of the files differs between epochs, as ``EpochShuffle`` says.
        format: ``auto`` takes it from the names. The suffixes ``.gz``, ``.bz2``, ``.xz`` and ``.zst`` always count.
        n_standby_shards: number of files that are fetched before they join.
        timeout: seconds of retries for a file that fails or does not answer.
        max_bad_fraction: largest share of a file's records that may be invalid (no JSON objects) and are skipped. It is
            enforced after 100 records of a file, and at its end. A file without any usable record is always an error.
        n_prefetch_samples: 0 turns off read-ahead of remote files. Its unit is pieces, not records.

    A state has, for each open file, the end of its last record, as a byte offset (JSONL, CBOR) or a row (parquet), and
    the file's size and ETag. A resume continues from there. The offset in a compressed file is that of the decompressed
    data, so a resume reads the file again up to it. The state also has the names of all files below their common
    folder. The folder may move, even to another kind of store: then the sizes must be equal, but not the ETags. The
    version of a local file is its size and a hash of its first and last 64 KiB, which does not change when it moves.

    ``shard_by_rank`` gives each share whole files. If there are fewer files than shares, and all are parquet, it gives
    each share some row groups of a file.

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
        if shuffle_shards and seed is None:  # it would mean no shuffle
            raise ValueError("from_files: shuffle_shards=True needs a seed, got None")
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
        """Return all files; globs are expanded at the first call."""
        if self._expanded is None:
            self._expanded = [found for url in self._given for found in expand_pattern(context, url, self.timeout)]
        return self._expanded

    def open(self, context: PipelineContext, state: State | None = None) -> StreamIterator[Any]:
        return _FilesIterator(self, context, self.reader(state))

    def parts(self, urls: Sequence[str], count: int) -> int:
        """Return the number of parts per file, so that each of ``count`` shares has one; only parquet is divisible."""
        if len(urls) >= count or any(format_of(url, self.format) != "parquet" for url in urls):
            return 1
        return -(-count // len(urls)) if urls else 1

    def divide(self, parts: Sequence[Part], share: Share) -> State:
        """See ``Transform``. Open files go to the new shares with their positions, the others as in any epoch."""
        begun = [(part, self.reader(part.state)) for part in parts]
        saved = [one for _, one in begun if one]
        if saved:
            root, names = saved[0].text("root"), saved[0].text("names").split("\n")
        else:
            with contextlib.closing(PipelineContext()) as context:
                root, names = relative_names(self.urls(context))
        divided = saved[0].integer("parts", low=1) if saved else self.parts(names, parts[0].share.count)
        finer = self.parts(names, -(-share.count // divided)) if len(names) * divided < share.count else 1
        former = [
            Former(part.share, StateReader(one.stage, one.child("places")) if one else None, part.ended)
            for part, one in begun
        ]
        active = sorted((item for one in saved for item in one.items("active", kind=list)), key=lambda item: item[:3])
        return {
            "names": "\n".join(names),
            "root": root,
            "parts": divided * finer,
            "places": divide_places(former, len(names) * divided, share, finer, shuffled=self.shuffle_shards),
            "records": sum(one.integer("records") for one in saved),
            "active": share.of(active),
            "counts": divided_counts(saved, share),
        }

    def describe(self, *, pinned: bool) -> str:
        shuffle = f", shuffle_shards({self.seed})" if self.shuffle_shards else ""
        repeat = ", repeat" if self.repeat else ""
        return f"from_files({self.format}, {self.n_active_shards} active{repeat}{shuffle})"


class _FilesIterator(StreamIterator[dict[str, Any]]):
    """Counts ``bad_records``."""

    def __init__(self, transform: FromFiles, context: PipelineContext, saved: StateReader | None) -> None:
        super().__init__()
        self._transform = transform
        self._context = context
        self._urls = transform.urls(context)
        self._root, names = relative_names(self._urls)
        self._names = "\n".join(names)
        self._shuffle = EpochShuffle(len(self._urls), transform.seed if transform.shuffle_shards else None)
        self._records = 0  # of this epoch
        self._from_start = saved is None  # this iterator reads all of this share's files of the epoch
        self._empty: set[int] = set()  # places without records in the last epochs, by file and part
        self._active: deque[_Active] = deque()
        self._standby: deque[_Active] = deque()
        share = context.share or Share(0, 1)
        self._parts = saved.integer("parts", low=1) if saved else transform.parts(self._urls, share.count)
        places = StateReader(saved.stage, saved.child("places")) if saved else None
        if saved and saved.text("names") != self._names:
            raise _other_files(saved.text("root"), saved.text("names").split("\n"), self._root, names)
        self._places = SharedPlaces(
            len(names) * self._parts, share, transform.repeat, "files", places, shuffled=transform.shuffle_shards
        )
        self._share_places = range(share.index, len(names) * self._parts, share.count)
        self._share_size = len(self._share_places)
        if saved:
            self._records = saved.integer("records")
            self.counts = saved.counts()
            self._active.extend(self._resumed(item, saved) for item in saved.items("active", kind=list))
        self._order = self._shuffle.order(self._places.epoch)
        self._fill()

    def __next__(self) -> dict[str, Any]:
        active = self._active
        while True:
            while not active:  # after a change of ranks an epoch may have no file left for this one
                if not self._next_epoch():
                    raise StopIteration
            shard = active[0].shard
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
            "names": self._names,
            "root": self._root,
            "parts": self._parts,
            "places": self._places.state(),
            "records": self._records,
            "active": [[one.number, *one.part, one.shard.state()] for one in self._active],
            "counts": dict(self.counts),
        }

    def report(self) -> dict[str, int]:
        """Return ``counts``, the epoch, and the files of this share in it."""
        ended = max(0, self._share_size - len(self._places.left()) - len(self._active))
        return {**self.counts, "epoch": self._places.epoch, "files": self._share_size, "files_ended": ended}

    def close(self) -> None:
        for one in (*self._active, *self._standby):
            one.shard.close()

    def _next_epoch(self) -> bool:
        epoch = self._places.epoch
        if self._places.following() == epoch + 1 and self._has_no_record():
            logger.warning("from_files: an epoch had no record in any of its %d files; it is the last", len(self._urls))
            return False
        if not self._places.advance():
            return False
        if self._places.epoch > epoch:
            self._records = 0
        self._from_start = self._places.left() == self._share_places
        self._order = self._shuffle.order(self._places.epoch)
        self._fill()
        return True

    def _has_no_record(self) -> bool:
        """Return whether no later epoch can have a record, because this share has read all its files in vain."""
        if self._records or not self._from_start:
            self._empty.clear()
            return False
        if not self._transform.shuffle_shards:
            return True
        # Another epoch gives this share other files.
        for place in self._share_places:
            number, part = divmod(place, self._parts)
            self._empty.add(self._order[number] * self._parts + part)
        return len(self._empty) == len(self._urls) * self._parts

    def _fill(self) -> None:
        """Activate files up to ``n_active_shards``, and prepare the standby files."""
        places = self._places
        while len(self._active) < self._transform.n_active_shards:
            place = next(places.run, None)
            if place is None:
                if places.following() != places.epoch:
                    break
                places.advance()
                continue
            self._active.append(self._standby.popleft() if self._standby else self._opened(place))
        ahead = places.left()[len(self._standby) : self._transform.n_standby_shards]
        self._standby.extend(map(self._opened, ahead))

    def _opened(self, place: int) -> "_Active":
        place, part = divmod(place, self._parts)
        return self._shard(self._order[place], (part, self._parts))

    def _resumed(self, item: list[Any], saved: StateReader) -> "_Active":
        if len(item) != 4:
            raise saved.wrong("active", "lists of file, part, parts and position", item)
        number = saved.integer_of(item[0], "active", high=len(self._urls) - 1)
        parts = saved.integer_of(item[2], "active", low=1)
        position = StateReader(f"{saved.stage}, {self._urls[number]}", item[3])
        version = position.text("version")
        if saved.text("root") != self._root:
            version = version_of_copy(version, self._urls[number])
        position = StateReader(position.stage, {**item[3], "version": version})
        return self._shard(number, (saved.integer_of(item[1], "active", high=parts - 1), parts), position)

    def _shard(self, number: int, part: tuple[int, int], saved: StateReader | None = None) -> "_Active":
        transform = self._transform
        file = SourceFile(self._context, self._urls[number], transform.timeout, ahead=transform.ahead)
        shard = SourceShard(file, transform.format, transform.max_bad_fraction, part, saved)
        if transform.ahead:
            shard.prepare()
        return _Active(number, part, shard)


class _Active(NamedTuple):
    """An open file: its number in the list, the part to read, and the number of parts."""

    number: int
    part: tuple[int, int]
    shard: SourceShard


def _other_files(saved_root: str, saved: list[str], root: str, names: list[str]) -> StateError:
    """Return the error for a list of files that differs from the state's; it names the first difference."""
    here = [root + name for name in names]
    folder = _folder_now(saved_root, saved, here)
    before = [folder + name for name in saved]
    pairs = zip(before, here, strict=False)
    at = next((i for i, (was, now) in enumerate(pairs) if was != now), min(len(before), len(here)))
    was, now = (urls[at] if at < len(urls) else None for urls in (before, here))
    if now and now not in set(before):
        differs = f"{now} is not one of the state's files"
    elif was and was not in set(here):
        differs = f"the state's file {was} is missing"
    elif was and now:
        differs = f"file {at + 1} was {was} when the state was saved, here it is {now}"
    else:
        differs = f"file {at + 1}, {was or now}, is in only one of the lists"
    return StateError(
        f"from_files: the list had {len(saved)} files when the state was saved, here it has {len(names)}; {differs}: "
        f"give the same files in the same order"
    )


def _folder_now(saved_root: str, saved: list[str], here: list[str]) -> str:
    """Return the current location of the common folder of ``saved``; that of another list may be higher or lower."""
    found = set(here)
    first = (url[: -len(saved[0])] for url in here if url.endswith(f"/{saved[0]}"))
    last = (url[: -len(saved[-1])] for url in reversed(here) if url.endswith(f"/{saved[-1]}"))
    folders = [saved_root, *islice(first, 1), *islice(last, 1)]
    return max(folders, key=lambda folder: sum(folder + name in found for name in saved))

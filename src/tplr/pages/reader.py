"""Reads the texts of pages: reads a parquet file's footer once, then the text column of one row group."""

import asyncio
import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from tplr.errors import DataError, PreconditionFailed, StoreUnavailable
from tplr.pages.fetch_manifest import fetch_manifest
from tplr.pages.manifest import TEXT_COLUMN, DatasetManifest, ParquetShard
from tplr.pages.manifest_cache import ManifestCache
from tplr.pages.page_draw import ROWS_PER_PAGE, GroupRows, ShardRows, group_rows, shard_rows
from tplr.schemas import PageRef
from tplr.storage.base import ObjectStore
from tplr.storage.many import for_each
from tplr.storage.replicas import Replicas

REQUEST_BYTES = 4 * 2**20
_REQUESTS_AT_ONCE = 4  # for one column chunk
_MAX_FOOTER_BYTES = 64 * 2**20
_END = 8  # bytes at a parquet file's end that contain its footer's length
_PARSED_INLINE = 16 * 1024  # bytes; parsing them takes no longer than passing them to a thread
_MAGIC = b"PAR1"
_ROWS_DECODED = 1024  # at most at once; rows of the row group behind the page are not decoded
_MAX_TEXT_BYTES = 2**30  # of a row group as in the file, and of a page's texts in it


@dataclass(frozen=True)
class Footer:
    """A parquet file's footer.

    Attributes:
        etag, size: ETag and size of the file.
        group_sizes: number of rows of each row group.
    """

    etag: str
    size: int
    metadata: pq.FileMetaData
    group_sizes: tuple[int, ...]

    def text_range(self, group: int) -> tuple[int, int]:
        """Return the bytes ``[start, stop)`` of the file that hold the text column of a row group.

        The range is the one that pyarrow requests when it reads the column. If the footer is damaged,
        ``metadata.row_group(group).column(column)`` would abort the process, while a read raises.

        Raises:
            ArrowException, OSError, UnicodeDecodeError: the footer is damaged.
        """
        probe = _Probe(self.size)
        try:
            next(_batches(self, group, 1, probe), None)
        except OSError:
            if probe.asked is None:
                raise
        if probe.asked is None or probe.asked[1] > self.size:
            raise OSError(f"the footer has no file offset for the text of row group {group}")
        return probe.asked


class Footers:
    """LRU cache of footers, by any key. Threads may share one.

    Args:
        bytes_kept: maximum size of all footers as in their files; parsed footers take several times as much memory.
    """

    def __init__(self, bytes_kept: int = 16 * 2**20) -> None:
        self._bytes_kept = bytes_kept
        self._kept: OrderedDict[object, Footer] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.guess = 16 * 1024
        """Bytes at a file's end that probably hold its footer. Footers of one dataset have similar lengths."""

    def get(self, key: object) -> Footer | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: object, footer: Footer) -> None:
        self.drop(key)
        with self._lock:
            self._kept[key] = footer
            self._bytes += footer.metadata.serialized_size
            self.guess = max(1024, min(footer.metadata.serialized_size * 9 // 8, _MAX_FOOTER_BYTES))
            while self._bytes > self._bytes_kept and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].metadata.serialized_size

    def drop(self, key: object) -> None:
        with self._lock:
            if key in self._kept:
                self._bytes -= self._kept.pop(key).metadata.serialized_size


@dataclass
class BytesRead:
    """Counts the fetched bytes of column chunks and of footers."""

    text: int = 0
    footers: int = 0


class PageReader:
    """Reads pages of one dataset. Every file is checked against the manifest.

    Args:
        request_bytes: maximum size of one request; a longer column chunk is fetched by several concurrent requests.
        footers: cache shared by readers of the same dataset and the same replicas in the same order; default: a new
            one.
        bytes_read: counter to increment.

    Attributes:
        manifest: the dataset's manifest; nodes compare ``manifest.sha256``.
        rows_per_page: length of a page.
    """

    def __init__(
        self,
        manifest: DatasetManifest,
        subfolder: str,
        replicas: Replicas,
        rows_per_page: int = ROWS_PER_PAGE,
        *,
        request_bytes: int = REQUEST_BYTES,
        footers: Footers | None = None,
        bytes_read: BytesRead | None = None,
    ) -> None:
        self.bytes_read = bytes_read or BytesRead()
        self.manifest = manifest
        self.rows_per_page = rows_per_page
        self._subfolder = subfolder
        self._request_bytes = request_bytes
        self._replicas = replicas
        self._footers = Footers() if footers is None else footers
        self._fetching: dict[object, asyncio.Lock] = {}

    @classmethod
    async def open(
        cls,
        stores: Sequence[ObjectStore],
        subfolder: str,
        *,
        rows_per_page: int = ROWS_PER_PAGE,
        concurrency: int = 8,
        cache: ManifestCache | None = None,
    ) -> Self:
        """Fetch the manifest from one of ``stores``, which hold the same dataset and must stay open during reads.

        Args:
            concurrency: number of pages that are read concurrently.
            cache: caches the manifest on disk.

        Raises:
            DataError: the manifest is not well-formed.
            StoreError: it can't be fetched.
        """
        replicas = Replicas(stores, concurrency=concurrency)
        return cls(await fetch_manifest(replicas, subfolder, cache), subfolder, replicas, rows_per_page)

    async def texts(self, page: PageRef) -> list[str]:
        """Return the page's rows, in order; a null becomes an empty text.

        Raises:
            DataError: the manifest has no such page, or a file contradicts it.
            StoreError: a file can't be fetched, or keeps changing.
        """
        parts = shard_rows(self.manifest, page, self.rows_per_page)
        texts = [await self._replicas.ask(partial(self._read, rows=rows)) for rows in parts]
        return [text for part in texts for text in part]

    async def _read(self, store: ObjectStore, rows: ShardRows) -> list[str]:
        key = f"{self._subfolder}/{rows.shard.path}"
        place = self._replicas.stores.index(store), key
        try:
            footer = await self._footer(store, place, key, rows.shard)
            texts: list[str] = []
            for part in group_rows(rows, footer.group_sizes, self.manifest.address):
                if part.start == part.stop:  # group-average may name an empty group
                    continue
                start, stop = footer.text_range(part.group)
                if stop - start > _MAX_TEXT_BYTES:
                    raise _too_large(f"{key}: the text of row group {part.group} takes", stop - start)
                pieces = [(at, min(at + self._request_bytes, stop)) for at in range(start, stop, self._request_bytes)]
                fetch = partial(self._fetch, store, key, footer.etag)
                chunk = _Chunk(start, b"".join(await for_each(pieces, fetch, concurrency=_REQUESTS_AT_ONCE)))
                texts += await asyncio.to_thread(_decode, key, footer, part, chunk)
        except UnicodeDecodeError as error:
            raise DataError(f"{key}, rows {rows.start} to {rows.stop}: not UTF-8: {error}") from error
        except (PreconditionFailed, pa.ArrowException, OSError) as error:
            # The file was replaced, or bytes were damaged in transit: the next attempt fetches the footer again.
            self._footers.drop(place)
            message = f"changed or damaged while it was read: {error}"
            raise StoreUnavailable(message, bucket=store.name, key=key) from error
        return texts

    async def _fetch(self, store: ObjectStore, key: str, etag: str, piece: tuple[int, int]) -> bytes:
        """Fetch bytes ``[start, stop)`` of a file."""
        start, stop = piece
        body = await store.get(key, max_bytes=stop - start, if_match=etag, byte_range=piece)
        self.bytes_read.text += stop - start
        return body

    async def _footer(self, store: ObjectStore, place: object, key: str, shard: ParquetShard) -> Footer:
        """Return the footer at ``place``, cached or fetched; concurrent calls for one place share the requests."""
        if footer := self._footers.get(place):
            return footer
        try:
            async with self._fetching.setdefault(place, asyncio.Lock()):
                if not (footer := self._footers.get(place)):
                    footer, fetched = await fetch_footer(store, key, shard, guess=self._footers.guess)
                    self.bytes_read.footers += fetched
                    self._footers.put(place, footer)
                return footer
        finally:
            self._fetching.pop(place, None)


class _Probe(io.RawIOBase):
    """A file of ``size`` bytes without content. Records the first range ``[start, stop)`` that is read, and raises."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0
        self.asked: tuple[int, int] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        self._position = position + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        self.asked = self.asked or (self._position, self._position + size)
        raise OSError("not fetched yet")


class _Chunk(io.BytesIO):
    """Bytes of a file from ``first`` on, as a file; positions are those of the whole file."""

    def __init__(self, first: int, data: bytes) -> None:
        super().__init__(data)
        self._first = first

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET:
            position -= self._first
            if position < 0:
                raise OSError(f"byte {self._first + position} was not fetched")
        return super().seek(position, whence) + self._first

    def tell(self) -> int:
        return super().tell() + self._first


def _decode(key: str, footer: Footer, part: GroupRows, chunk: _Chunk) -> list[str]:
    """Decode the texts of rows in ``chunk``, the text column of their group.

    Raises:
        DataError: they may take more than ``_MAX_TEXT_BYTES``.
        ArrowException, OSError, UnicodeDecodeError: the chunk is damaged.
    """
    texts: list[str] = []
    row = size = 0
    for batch in _batches(footer, part.group, min(part.stop, _ROWS_DECODED), chunk):
        column = batch.column(0)
        inside = column.slice(max(part.start - row, 0), max(part.stop - max(part.start, row), 0))
        if (size := size + inside.nbytes) > _MAX_TEXT_BYTES:
            raise _too_large(f"{key}: rows {part.start} to {part.stop} of row group {part.group} take", size)
        texts += [text or "" for text in inside.to_pylist()]
        row += len(column)
        if row >= part.stop:
            return texts
    raise OSError(f"the row group has {row} rows, expected {footer.group_sizes[part.group]} from its footer")


def _too_large(what: str, size: int) -> DataError:
    return DataError(f"{what} {size} bytes of memory, at most {_MAX_TEXT_BYTES} are allowed: write smaller row groups")


def _batches(footer: Footer, group: int, rows: int, file: io.IOBase) -> Iterator[pa.RecordBatch]:
    """Yield the text column of a row group, up to ``rows`` rows at a time."""
    reader = pq.ParquetFile(
        pa.PythonFile(file, mode="r"),
        metadata=footer.metadata,
        page_checksum_verification=True,
        pre_buffer=False,  # it would copy data that is in memory already, in another thread
    )
    return reader.iter_batches(rows, row_groups=[group], columns=[TEXT_COLUMN], use_threads=False)


async def fetch_footer(store: ObjectStore, key: str, shard: ParquetShard, *, guess: int) -> tuple[Footer, int]:
    """Fetch a shard's footer, and check it against the manifest; return it and the number of bytes fetched.

    Args:
        guess: number of bytes to fetch first. A longer footer costs a second request.

    Raises:
        DataError: the file is not a parquet file, or contradicts the manifest.
        PreconditionFailed: the file was replaced between two requests.
        StoreError: it can't be fetched.
    """
    try:
        info, tail = await store.get_piece(key, -guess, guess)
    except PreconditionFailed as error:
        raise DataError(f"{key} is empty, so it is not a parquet file") from error
    size = info.size
    if shard.byte_size is not None and size != shard.byte_size:
        raise DataError(f"{key} has {size} bytes, the manifest says {shard.byte_size}: file and manifest do not match")
    fetched = len(tail)
    length = _footer_length(key, tail, size)
    if fetched < length:
        tail = await store.get(key, max_bytes=length, if_match=info.etag, byte_range=(size - length, size))
        fetched += length
        _footer_length(key, tail, size)
    parse = partial(_parse, key, tail, shard, etag=info.etag, size=size)
    return parse() if length <= _PARSED_INLINE else await asyncio.to_thread(parse), fetched


def _footer_length(key: str, tail: bytes, size: int) -> int:
    """Return the footer's length from ``tail``, the end of a file of ``size`` bytes. Raises DataError."""
    if len(tail) < _END + len(_MAGIC) or not tail.endswith(_MAGIC):
        raise DataError(f"{key} is not a parquet file")
    length = int.from_bytes(tail[-_END : -len(_MAGIC)], "little") + _END
    if length > min(size, _MAX_FOOTER_BYTES):
        raise DataError(f"{key}: a footer of {length} bytes in a file of {size}; at most {_MAX_FOOTER_BYTES} are read")
    return length


def _parse(key: str, tail: bytes, shard: ParquetShard, *, etag: str, size: int) -> Footer:
    """Parse the footer at the end of ``tail``. Raises DataError if it can't be read or contradicts the manifest."""
    try:
        metadata = pq.read_metadata(pa.BufferReader(tail))
        group_sizes = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        columns = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{key}: its footer can't be read: {error}") from error
    if difference := shard.disagreement(group_sizes):
        raise DataError(f"{key} has {difference}: file and manifest do not match")
    if TEXT_COLUMN not in columns:
        raise DataError(f"{key} has no column {TEXT_COLUMN!r}, only {', '.join(columns)}")
    kind = schema.field(TEXT_COLUMN).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{key}: column {TEXT_COLUMN!r} holds {kind}, expected text")
    return Footer(etag, size, metadata, group_sizes)

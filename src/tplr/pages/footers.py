"""Fetches, checks and caches the footers of parquet files."""

import asyncio
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from tplr.errors import DataError, PreconditionFailed
from tplr.pages.manifest import ParquetShard
from tplr.storage.base import ObjectStore

TEXT_COLUMN = "text"
_MAX_BYTES = 64 * 1024 * 1024
_END = 8  # bytes at a parquet file's end that give its footer's length
_PARSED_INLINE = 16 * 1024  # bytes; parsing them takes no longer than handing them to a thread
_MAGIC = b"PAR1"


@dataclass(frozen=True)
class Footer:
    """A parquet file's footer.

    Attributes:
        etag, size: of the file that the footer was read from.
        group_sizes: number of rows of each row group.
        column: index of the text column.
    """

    etag: str
    size: int
    metadata: pq.FileMetaData
    group_sizes: tuple[int, ...]
    column: int

    def text_range(self, group: int) -> tuple[int, int]:
        """Bytes ``[start, stop)`` of the file that hold the text column of a row group."""
        chunk = self.metadata.row_group(group).column(self.column)
        start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
        return start, start + chunk.total_compressed_size


class Footers:
    """LRU cache of footers, by any key. Threads may share one.

    Args:
        bytes_kept: of footers as in their files; parsed, they take several times as much memory.
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
            self.guess = max(1024, min(footer.metadata.serialized_size * 9 // 8, _MAX_BYTES))
            while self._bytes > self._bytes_kept and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].metadata.serialized_size

    def drop(self, key: object) -> None:
        with self._lock:
            if key in self._kept:
                self._bytes -= self._kept.pop(key).metadata.serialized_size


async def fetch_footer(store: ObjectStore, key: str, shard: ParquetShard, *, guess: int) -> tuple[Footer, int]:
    """A shard's footer, checked against the manifest; and how many bytes were fetched for it.

    Args:
        guess: bytes to fetch first. A longer footer costs a second request.

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
    """Bytes of the footer at the end of a file of ``size`` bytes, of which ``tail`` is the end. Raises DataError."""
    if len(tail) < _END + len(_MAGIC) or not tail.endswith(_MAGIC):
        raise DataError(f"{key} is not a parquet file")
    length = int.from_bytes(tail[-_END : -len(_MAGIC)], "little") + _END
    if length > min(size, _MAX_BYTES):
        raise DataError(f"{key}: a footer of {length} bytes in a file of {size}; at most {_MAX_BYTES} are read")
    return length


def _parse(key: str, tail: bytes, shard: ParquetShard, *, etag: str, size: int) -> Footer:
    """The footer at the end of ``tail``. Raises DataError if it can't be read or contradicts the manifest."""
    try:
        metadata = pq.read_metadata(pa.BufferReader(tail))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{key}: its footer can't be read: {error}") from error
    group_sizes = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    if difference := shard.disagreement(group_sizes):
        raise DataError(f"{key} has {difference}: file and manifest do not match")
    columns = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    if TEXT_COLUMN not in columns:
        raise DataError(f"{key} has no column {TEXT_COLUMN!r}, only {', '.join(columns)}")
    kind = metadata.schema.to_arrow_schema().field(TEXT_COLUMN).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{key}: column {TEXT_COLUMN!r} holds {kind}, expected text")
    return Footer(etag, size, metadata, group_sizes, columns.index(TEXT_COLUMN))

"""Reads the text of a page: of a parquet file its footer, once, and then one column of one row group."""

import asyncio
import io
from collections import OrderedDict
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from tplr.data.pages import ROWS_PER_PAGE, GroupRows, ShardRows, group_rows, shard_rows
from tplr.data.replicas import Replicas
from tplr.data.shards import Manifest, Shard
from tplr.errors import DataError, PreconditionFailed, StoreUnavailable
from tplr.schemas import PageRef
from tplr.storage.base import ObjectStore

TEXT_COLUMN = "text"
FOOTERS_KEPT = 32  # parsed footers of large files take megabytes
_FOOTER_GUESS = 64 * 1024  # most footers come whole with so many bytes of the file's end
_FOOTER_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True)
class Footer:
    """What a parquet file says of itself, the version of the file that says so, and where its text lies.

    Attributes:
        group_sizes: number of rows of each row group.
        column: position of the text column.
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


@dataclass
class _FooterSlot:
    """Pages of one file that are read at once share one request for its footer."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    footer: Footer | None = None


class PageReader:
    """Texts of pages of one dataset. Nothing that contradicts the manifest is ever returned."""

    def __init__(
        self, manifest: Manifest, subfolder: str, replicas: Replicas, rows_per_page: int = ROWS_PER_PAGE
    ) -> None:
        self._manifest = manifest
        self._subfolder = subfolder
        self._replicas = replicas
        self._rows_per_page = rows_per_page
        self._footers: OrderedDict[tuple[ObjectStore, str], _FooterSlot] = OrderedDict()

    async def texts(self, page: PageRef) -> list[str]:
        """The page's rows, in order; a row without text is an empty one.

        Raises:
            DataError: the manifest has no such page, or a file contradicts it.
            StoreError: a file can't be had, or not in one piece.
        """
        parts = shard_rows(self._manifest, page, self._rows_per_page)
        texts = [await self._replicas.ask(lambda store, rows=rows: self._read(store, rows)) for rows in parts]
        return [text for part in texts for text in part]

    async def _read(self, store: ObjectStore, rows: ShardRows) -> list[str]:
        key = f"{self._subfolder}/{rows.shard.path}"
        try:
            footer = await self._footer(store, key, rows.shard)
            texts: list[str] = []
            for part in group_rows(rows, footer.group_sizes, self._manifest.address):
                if part.start == part.stop:  # group-average may mean an empty group
                    continue
                start, stop = footer.text_range(part.group)
                data = await _get(store, key, start, stop, footer.etag)
                texts += await asyncio.to_thread(_decode, footer, part, start, data)
        except (PreconditionFailed, pa.ArrowException, OSError) as error:
            # The file changed, or bytes were damaged on the way: the next attempt begins with the footer.
            self._footers.pop((store, key), None)
            message = f"changed or damaged while it was read: {error}"
            raise StoreUnavailable(message, bucket=store.name, key=key) from error
        return texts

    async def _footer(self, store: ObjectStore, key: str, shard: Shard) -> Footer:
        slot = self._footers.setdefault((store, key), _FooterSlot())
        self._footers.move_to_end((store, key))
        while len(self._footers) > FOOTERS_KEPT:
            self._footers.popitem(last=False)
        async with slot.lock:
            if slot.footer is None:
                slot.footer = await fetch_footer(store, key, shard)
            return slot.footer


async def fetch_footer(store: ObjectStore, key: str, shard: Shard) -> Footer:
    """The footer of a shard, if it is what the manifest says of it."""
    info = await store.head(key)
    size = info.size
    if shard.byte_size is not None and size != shard.byte_size:
        raise DataError(f"{key} has {size} bytes, the manifest says {shard.byte_size}: file and manifest do not match")
    tail = await _get(store, key, max(0, size - _FOOTER_GUESS), size, info.etag) if size else b""
    if len(tail) < 12 or tail[-4:] != b"PAR1":
        raise DataError(f"{key} is no parquet file")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > min(size, _FOOTER_LIMIT):
        raise DataError(f"{key}: a footer of {length} bytes in a file of {size}; at most {_FOOTER_LIMIT} are read")
    if length > len(tail):
        tail = await _get(store, key, size - length, size, info.etag)
    try:
        metadata = await asyncio.to_thread(pq.read_metadata, pa.BufferReader(tail))
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
    return Footer(info.etag, size, metadata, group_sizes, columns.index(TEXT_COLUMN))


async def _get(store: ObjectStore, key: str, start: int, stop: int, etag: str) -> bytes:
    return await store.get(key, max_bytes=stop - start, if_match=etag, byte_range=(start, stop))


def _decode(footer: Footer, part: GroupRows, start: int, data: bytes) -> list[str]:
    file = pq.ParquetFile(
        pa.PythonFile(_Fragment(data, start, footer.size), mode="r"),
        metadata=footer.metadata,
        page_checksum_verification=True,
    )
    texts = file.read_row_group(part.group, columns=[TEXT_COLUMN], use_threads=False).column(0)
    if len(texts) != footer.group_sizes[part.group]:
        raise OSError(f"{len(texts)} rows came, its footer says {footer.group_sizes[part.group]}")
    return [text or "" for text in texts[part.start : part.stop].to_pylist()]


class _Fragment(io.RawIOBase):
    """A file of ``size`` bytes of which only those from ``start`` on, as many as ``data`` has, are there."""

    def __init__(self, data: bytes, start: int, size: int) -> None:
        self._data, self._start, self._size = data, start, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        size = self._size - self._position if size < 0 else size
        offset = self._position - self._start
        if offset < 0 or offset + size > len(self._data):
            raise OSError(f"bytes {self._position} to {self._position + size} were not fetched")
        self._position += size
        return self._data[offset : offset + size]

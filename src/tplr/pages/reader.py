"""Reads the text of a page: of a parquet file its footer, once, and then one column of one row group."""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from tplr.errors import PreconditionFailed, StoreUnavailable
from tplr.pages.footers import TEXT_COLUMN, Footer, Footers, fetch_footer
from tplr.pages.manifest import DatasetManifest, ParquetShard
from tplr.pages.page_draw import ROWS_PER_PAGE, GroupRows, ShardRows, group_rows, shard_rows
from tplr.schemas import PageRef
from tplr.storage.base import ObjectStore
from tplr.storage.ranged_file import RangedFile
from tplr.storage.replicas import Replicas

_ROWS_DECODED = 1024  # at most at once; what follows a page in its row group need not be decoded


@dataclass
class BytesRead:
    """Bytes fetched: of column chunks that pages lie in, and of footers."""

    text: int = 0
    footers: int = 0


@dataclass
class _Fetching:
    """Pages of one file that are read at once share the requests for its footer."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class PageReader:
    """Texts of pages of one dataset. Nothing that contradicts the manifest is ever returned.

    Args:
        footers: kept by readers of the same replicas, in the same order, and the same dataset; default is its own.
        bytes_read: counts on.
    """

    def __init__(
        self,
        manifest: DatasetManifest,
        subfolder: str,
        replicas: Replicas,
        rows_per_page: int = ROWS_PER_PAGE,
        *,
        footers: Footers | None = None,
        bytes_read: BytesRead | None = None,
    ) -> None:
        self.bytes_read = bytes_read or BytesRead()
        self._manifest = manifest
        self._subfolder = subfolder
        self._replicas = replicas
        self._rows_per_page = rows_per_page
        self._footers = Footers() if footers is None else footers
        self._fetching: dict[object, _Fetching] = {}

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
        place = self._replicas.stores.index(store), key
        try:
            footer = await self._footer(store, place, key, rows.shard)
            texts: list[str] = []
            for part in group_rows(rows, footer.group_sizes, self._manifest.address):
                if part.start == part.stop:  # group-average may mean an empty group
                    continue
                start, stop = footer.text_range(part.group)
                data = await store.get(key, max_bytes=stop - start, if_match=footer.etag, byte_range=(start, stop))
                self.bytes_read.text += stop - start
                texts += await asyncio.to_thread(_decode, footer, part, start, data)
        except (PreconditionFailed, pa.ArrowException, OSError) as error:
            # The file changed, or bytes were damaged on the way: the next attempt begins with the footer.
            self._footers.drop(place)
            message = f"changed or damaged while it was read: {error}"
            raise StoreUnavailable(message, bucket=store.name, key=key) from error
        return texts

    async def _footer(self, store: ObjectStore, place: object, key: str, shard: ParquetShard) -> Footer:
        if footer := self._footers.get(place):
            return footer
        fetching = self._fetching.setdefault(place, _Fetching())
        fetching.users += 1
        try:
            async with fetching.lock:
                if not (footer := self._footers.get(place)):
                    footer, fetched = await fetch_footer(store, key, shard, guess=self._footers.guess)
                    self.bytes_read.footers += fetched
                    self._footers.put(place, footer)
                return footer
        finally:
            fetching.users -= 1
            if not fetching.users:
                del self._fetching[place]


def _decode(footer: Footer, part: GroupRows, start: int, data: bytes) -> list[str]:
    file = pq.ParquetFile(
        pa.PythonFile(RangedFile(footer.size, partial(_fetched, data, start)), mode="r"),
        metadata=footer.metadata,
        page_checksum_verification=True,
        pre_buffer=False,  # it is in memory: another thread would only read it there
    )
    texts: list[str] = []
    row = 0
    rows = min(part.stop, _ROWS_DECODED)
    for batch in file.iter_batches(rows, row_groups=[part.group], columns=[TEXT_COLUMN], use_threads=False):
        column = batch.column(0)
        inside = column.slice(max(part.start - row, 0), max(part.stop - max(part.start, row), 0))
        texts += [text or "" for text in inside.to_pylist()]
        row += len(column)
        if row >= part.stop:
            return texts
    raise OSError(f"{row} rows came, its footer says {footer.group_sizes[part.group]}")


def _fetched(data: bytes, first: int, start: int, stop: int) -> bytes:
    """Bytes ``[start, stop)`` of a file of which ``data`` was fetched, from byte ``first`` on."""
    if start < first or stop > first + len(data):
        raise OSError(f"bytes {start} to {stop} were not fetched")
    return data[start - first : stop - first]

"""What parquet files say of themselves at their ends: fetched once, kept for as long as there is room."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from tplr.errors import DataError
from tplr.pages.manifest import ParquetShard

TEXT_COLUMN = "text"
LONGEST = 64 * 1024 * 1024
_END = 8  # bytes of a parquet file's end that say how long its footer is
_MAGIC = b"PAR1"


@dataclass(frozen=True)
class Footer:
    """A parquet file's footer, the version of the file that it belongs to, and where the file's text lies.

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


class Footers:
    """The footers used last, by any key. Threads may share one.

    Args:
        bytes_kept: of footers as they are in their files; parsed they take several times as much.
    """

    def __init__(self, bytes_kept: int = 16 * 2**20) -> None:
        self._bytes_kept = bytes_kept
        self._kept: OrderedDict[object, Footer] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.guess = 16 * 1024
        """How many bytes of a file's end probably hold its footer: those of one dataset are much alike."""

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
            self.guess = max(1024, min(footer.metadata.serialized_size * 9 // 8, LONGEST))
            while self._bytes > self._bytes_kept and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].metadata.serialized_size

    def drop(self, key: object) -> None:
        with self._lock:
            if key in self._kept:
                self._bytes -= self._kept.pop(key).metadata.serialized_size


def footer_length(key: str, tail: bytes, size: int) -> int:
    """How many bytes at the end of a file of ``size`` bytes are its footer, given at least 8 of them.

    Raises:
        DataError: it is no parquet file.
    """
    if len(tail) < _END + len(_MAGIC) or not tail.endswith(_MAGIC):
        raise DataError(f"{key} is no parquet file")
    length = int.from_bytes(tail[-_END : -len(_MAGIC)], "little") + _END
    if length > min(size, LONGEST):
        raise DataError(f"{key}: a footer of {length} bytes in a file of {size}; at most {LONGEST} are read")
    return length


def parse_footer(key: str, tail: bytes, shard: ParquetShard, *, etag: str, size: int) -> Footer:
    """The footer of a shard, if it is what the manifest says of the shard.

    Raises:
        DataError: it can't be read, or contradicts the manifest.
    """
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

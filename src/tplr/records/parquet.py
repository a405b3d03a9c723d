"""Reads rows of a parquet file as dictionaries, from any row on."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

BATCH_ROWS = 256


class ParquetReader:
    """Iterates over rows. If a read raises, or a loop ends early, the next iteration continues there.

    It starts no threads of pyarrow: with torch loaded, these sometimes abort the process at its exit, after correct
    output. ``pre_buffer`` would start some, too.

    Args:
        group, row: first row group, and number of its rows to skip.
        columns: names of the columns to read; default: all.
        values: converts a batch to its items; by default a dictionary for each row.
        verify: check the checksums of pages that have one.

    Attributes:
        group, row: position after the last returned row.
        decoded_bytes: size of all rows decoded so far.

    Raises:
        ArrowException, OSError: the file is damaged or no parquet file; also while iterating.
        ValueError, OverflowError: while iterating, one of the next ``BATCH_ROWS`` rows holds a value that Python can't
            hold, such as text that is not UTF-8. The position stays before these rows.
    """

    def __init__(
        self,
        file: BinaryIO,
        group: int = 0,
        row: int = 0,
        *,
        columns: Sequence[str] | None = None,
        values: Callable[[pa.RecordBatch], list[Any]] = pa.RecordBatch.to_pylist,
        verify: bool = False,
    ) -> None:
        self.group, self.row = group, row
        self.decoded_bytes = 0
        self._file = pq.ParquetFile(file, page_checksum_verification=verify, pre_buffer=False)
        self._columns = columns
        self._values = values
        self._stop = self._file.num_row_groups
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._rows: Iterator[Any] = iter(())

    @property
    def schema(self) -> pa.Schema:
        return self._file.schema_arrow

    def seek(self, row: int) -> None:
        """Go to a row of the file, counted from 0, before the first row is read."""
        self.group, self.row = 0, row
        while self.group < self._file.num_row_groups and self.row >= self._rows_in_group():
            self.group, self.row = self.group + 1, self.row - self._rows_in_group()

    def keep_part(self, index: int, count: int) -> None:
        """Read only one of ``count`` parts of the row groups, before the first row is read."""
        groups = self._file.num_row_groups
        first, self._stop = index * groups // count, (index + 1) * groups // count
        if self.group < first:
            self.group, self.row = first, 0

    def __iter__(self) -> Iterator[Any]:
        # A generator, which costs a loop half of what calls of ``__next__`` would.
        while True:
            for row in self._rows:
                self.row += 1
                yield row
            if not self._read_rows():
                return

    def __next__(self) -> Any:
        while True:
            for row in self._rows:
                self.row += 1
                return row
            if not self._read_rows():
                raise StopIteration

    def _read_rows(self) -> bool:
        """Read the next batch, or go to the next group; False at the end."""
        if self.group >= self._stop:
            return False
        if self._batches is None:
            self._batches = self._group_batches(skip=self.row)
        try:
            batch = next(self._batches, None)
            values = None if batch is None else self._values(batch)
            self.decoded_bytes += 0 if batch is None else batch.nbytes
        except BaseException:
            self._batches = None
            raise
        if values is None:
            self.group, self.row, self._batches = self.group + 1, 0, None
        else:
            self._rows = iter(values)
        return True

    def _group_batches(self, skip: int) -> Iterator[pa.RecordBatch]:
        for batch in self._file.iter_batches(
            BATCH_ROWS, row_groups=[self.group], columns=self._columns, use_threads=False
        ):
            skipped = min(skip, len(batch))
            skip -= skipped
            yield batch.slice(skipped)

    def _rows_in_group(self) -> int:
        return self._file.metadata.row_group(self.group).num_rows

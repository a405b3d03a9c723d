"""Records of a stream's file, each with the position behind it: JSONL, JSON, CBOR, parquet.

``tplr.records`` reads JSONL and parquet. This module adds the handling of invalid records in streams: they are counted
and skipped, because one in a billion must not end a run, but a file with too many of them is refused.
"""

import io
from abc import ABC, abstractmethod
from typing import Any, BinaryIO, Literal, cast

from tplr.errors import DataError
from tplr.logging import logger
from tplr.records.json_list import JsonList
from tplr.records.jsonl import MAX_RECORD_BYTES, LineReader, check_encoding, is_blank, parse_json
from tplr.streams.sources.bytes import Pieces
from tplr.streams.sources.compression import compression_of
from tplr.urls import file_name

KnownFormat = Literal["jsonl", "json", "cbor", "parquet"]
FileFormat = Literal["auto", "jsonl", "json", "cbor", "parquet"]
FORMATS = ("auto", "jsonl", "json", "cbor", "parquet")
SUFFIXES = (".jsonl", ".ndjson", ".json", ".cbor", ".parquet")

BAD_IN_A_ROW = 10
MIN_RECORDS = 100  # from this number of records on, ``max_bad_fraction`` is enforced within a file
_LOGGED = 10  # bad records of one file that the log names; all are counted


class Records(ABC):
    """``read`` returns the next record and raises StopIteration at the end.

    Attributes:
        place: position behind the last record, as plain JSON values; reading from there gives the next record.
        bad: number of records that this reader left out.
        counts: numbers of all records so far and of bad ones, with those of an earlier reader; zeros for a format in
            which a bad record is an error.
    """

    place: Any
    bad: int = 0
    counts: tuple[int, int] = (0, 0)

    @abstractmethod
    def read(self) -> dict[str, Any]: ...


def format_of(url: str, given: FileFormat = "auto") -> KnownFormat:
    """A file's format, as given, or by its name without a compression suffix. Raises DataError."""
    if given != "auto":
        return given
    name, _ = compression_of(file_name(url))
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return cast(KnownFormat, "jsonl" if suffix == ".ndjson" else suffix[1:])
    raise DataError(
        f"{url}: the name does not tell the format: expected {', '.join(SUFFIXES)}, perhaps followed by .gz, .bz2, "
        f'.xz or .zst; or say format="jsonl", "json", "cbor" or "parquet"'
    )


class BadRecords:
    """Counts the skipped records of one file, and refuses a file with too many of them.

    Args:
        unit: name of a record in this format.
        limit: largest share of bad records, enforced from ``MIN_RECORDS`` records on and at the end.
        count: counts of an earlier reader of this file.
        whole: whether the file is read from its start, so that it is known if any record was usable.
    """

    def __init__(self, url: str, unit: str, limit: float, count: int, *, whole: bool) -> None:
        self._url, self._unit, self._limit, self._whole = url, unit, limit, whole
        self.count = count
        self._new = 0
        self._in_a_row = 0
        self._last_read = 0
        self._why = ""  # what is wrong with the last one

    def add(self, where: str, read: int, why: str = "is not a JSON object") -> None:
        """Count a bad record, the last of the ``read`` records so far. Raises DataError."""
        self.count += 1
        self._new += 1
        self._in_a_row = self._in_a_row + 1 if read == self._last_read + 1 else 1
        self._last_read = read
        self._why = why
        if self._new <= _LOGGED:
            logger.warning("%s: the %s %s %s and is skipped", self._url, self._unit, where, why)
        if self._in_a_row >= BAD_IN_A_ROW:
            raise DataError(
                f"{self._url}: {BAD_IN_A_ROW} {self._unit}s in a row, up to the one {where}, are not usable: "
                f"the last {why}; check the file's format"
            )
        if read >= MIN_RECORDS:
            self._check(f"the {self._unit} {where}", read)

    def end(self, read: int) -> None:
        """Check the whole file of ``read`` records. Raises DataError."""
        if self._whole and self.count and self.count == read:
            raise DataError(
                f"{self._url}: not one of its {read} records is usable: the last {self._why}; check the file's format"
            )
        self._check("the end", read)

    def _check(self, where: str, read: int) -> None:
        if self.count > self._limit * read:
            raise DataError(
                f"{self._url}: {self.count} of {read} records up to {where} are not usable (the last {self._why}), "
                f"more than max_bad_fraction={self._limit} allows: repair the file, leave it out, or raise the limit"
            )


class JsonLines(Records):
    """One JSON object per line. Blank lines are skipped; invalid lines, and those of more than ``MAX_RECORD_BYTES``,
    are counted and skipped by ``BadRecords``. A file that is not UTF-8 from the first line on raises DataError.

    Args:
        counts: the ``counts`` of an earlier reader, which ended at ``offset``.
    """

    def __init__(
        self, pieces: Pieces, url: str, offset: int, *, max_bad_fraction: float = 1.0, counts: tuple[int, int] = (0, 0)
    ) -> None:
        records, bad = counts
        self._lines = LineReader(pieces.read, offset, records, MAX_RECORD_BYTES)
        self._url = url
        self._blank = 0
        self._bad = BadRecords(url, "line", max_bad_fraction, bad, whole=not offset)

    @property
    def place(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._lines.offset

    @property
    def counts(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._lines.number - self._blank, self._bad.count

    def read(self) -> dict[str, Any]:
        start = self._lines.offset
        for line in self._lines:
            long = len(line) > MAX_RECORD_BYTES
            try:
                record = None if long else parse_json(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                return record
            if not start:
                check_encoding(line, self._url)
            if not long and is_blank(line):
                self._blank += 1
            else:
                why = f"has more than {MAX_RECORD_BYTES} bytes (cut it)" if long else "is not a JSON object"
                self.bad += 1
                self._bad.add(f"at byte {start}", self.counts[0], why)
            start = self._lines.offset
        self._bad.end(self.counts[0])
        raise StopIteration


class Json(Records):
    """The objects of a JSON list, or one object; a position is a number of elements."""

    def __init__(
        self, pieces: Pieces, url: str, place: int, *, max_bad_fraction: float = 1.0, counts: tuple[int, int] = (0, 0)
    ) -> None:
        self._elements = JsonList(pieces.read, url)
        self._skip = place  # elements before the position
        self.place = place
        self._bad = BadRecords(url, "element", max_bad_fraction, counts[1], whole=not place)

    @property
    def counts(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.place, self._bad.count

    def read(self) -> dict[str, Any]:
        for record in self._elements:
            if self._skip:
                self._skip -= 1
                continue
            self.place += 1
            if isinstance(record, dict):
                return record
            self.bad += 1
            self._bad.add(f"number {self.place}", self.place)
        self._bad.end(self.place)
        raise StopIteration


class Cbor(Records):
    """Successive CBOR items, each a map."""

    def __init__(self, pieces: Pieces, url: str, offset: int) -> None:
        self._pieces = pieces
        self._url = url
        self.place = offset
        self._held = io.BytesIO()
        self._size = 0

    def read(self) -> dict[str, Any]:
        import cbor2

        while True:
            start = self._held.tell()
            if start < self._size:
                try:
                    record = cbor2.CBORDecoder(self._held).decode()
                    end = self._held.tell()
                    self._check_length(start, end)
                except (EOFError, cbor2.CBORDecodeEOF):  # since cbor2 6 its own is no EOFError
                    self._held.seek(start)
                    self._check_length(start, self._size)
                except cbor2.CBORError as error:
                    self._held.seek(start)  # else the next call would begin within the item, or find the end
                    raise DataError(f"{self._url}: the item at byte {self.place} is not valid CBOR: {error}") from error
                else:
                    self.place += end - start
                    if not isinstance(record, dict):
                        raise DataError(f"{self._url}: expected maps, got {type(record).__name__} before {self.place}")
                    return record
            self._more()

    def _check_length(self, start: int, end: int) -> None:
        """Check an item, or that part of it which is held. Raises DataError, after which the next call tries again."""
        if end - start > MAX_RECORD_BYTES:
            self._held.seek(start)
            where = f"{self._url}: the item at byte {self.place}"
            raise DataError(f"{where} has more than {MAX_RECORD_BYTES} bytes: cut it")

    def _more(self) -> None:
        """Double the buffered bytes, so that a long item is decoded only a few times."""
        held = [self._held.read()]
        size = len(held[0])
        wanted = 2 * size + 1
        try:
            while size < wanted and (piece := self._pieces.read()):
                held.append(piece)
                size += len(piece)
        finally:  # after a failed read the next call continues with these bytes
            self._held, self._size = io.BytesIO(b"".join(held)), size
        if size == len(held[0]):
            if size:
                raise DataError(f"{self._url}: ends in the middle of the item at byte {self.place}: it is truncated")
            raise StopIteration


class Parquet(Records):
    """Rows of a parquet file as dictionaries; a position is a row group and a row in it.

    Args:
        part: number of the part of the row groups to read, and the number of parts.

    Raises:
        DataError: it is no parquet file, or is truncated or damaged.
    """

    def __init__(self, file: BinaryIO, url: str, place: tuple[int, int], part: tuple[int, int] = (0, 1)) -> None:
        from tplr.records.parquet import ParquetReader

        self._url = url
        try:
            self._rows = ParquetReader(file, *place)
            self._rows.keep_part(*part)
        except Exception as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{url}: not a parquet file that can be read: {error}") from error

    @property
    def place(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._rows.group, self._rows.row

    def read(self) -> dict[str, Any]:
        import pyarrow as pa

        try:
            return next(self._rows)
        except DataError:
            raise
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
                raise  # of the disk or the network; pyarrow's own have neither
            raise DataError(
                f"{self._url}: damaged after row {self._rows.row} of row group {self._rows.group}: "
                f"{str(error).splitlines()[0]}; fetch or write it again"
            ) from error
        except (ValueError, OverflowError) as error:
            raise DataError(
                f"{self._url}: a row soon after row {self._rows.row} of row group {self._rows.group} holds a value "
                f"that can't be read: {error}"
            ) from error

"""Records of a stream's file, each with the position behind it: JSONL, CBOR, parquet.

``tplr.records`` reads JSONL and parquet. This module adds what a stream wants: invalid lines are counted and left out,
as one of a billion must not end a run, and what is no JSONL file at all is noticed.
"""

import io
from abc import ABC, abstractmethod
from typing import Any, BinaryIO, Literal

from tplr.errors import DataError
from tplr.logging import logger
from tplr.records.jsonl import LineReader, check_encoding, is_blank, parse_json
from tplr.streams.sources.bytes import Pieces
from tplr.streams.sources.compression import compression_of
from tplr.urls import file_name

FileFormat = Literal["auto", "jsonl", "cbor", "parquet"]
FORMATS = ("auto", "jsonl", "cbor", "parquet")

BAD_IN_A_ROW = 10
_LOGGED = 10  # bad records of one file that the log names; all are counted


class Records(ABC):
    """``read`` returns the next record and raises StopIteration at the end.

    Attributes:
        place: position behind the last record, as plain JSON values; reading from there gives the next record.
        bad: number of records left out so far.
    """

    place: Any
    bad: int = 0

    @abstractmethod
    def read(self) -> dict[str, Any]: ...


def format_of(url: str, given: FileFormat) -> Literal["jsonl", "cbor", "parquet"]:
    """A file's format, as given, or by its name without a compression suffix. Raises DataError."""
    if given != "auto":
        return given
    name, _ = compression_of(file_name(url))
    for suffix in ("jsonl", "cbor", "parquet"):
        if name.endswith(f".{suffix}"):
            return suffix  # pyright: ignore[reportReturnType]
    raise DataError(f'{url}: the name does not tell the format; say format="jsonl", "cbor" or "parquet"')


class JsonLines(Records):
    """One JSON object per line. Blank lines are skipped; invalid lines are counted and left out; ten invalid lines in a
    row raise DataError, and so does a file that is not UTF-8 from the first line on."""

    def __init__(self, pieces: Pieces, url: str, offset: int) -> None:
        self._lines = LineReader(pieces.read, offset)
        self._url = url
        self._bad_in_a_row = 0

    @property
    def place(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._lines.offset

    def read(self) -> dict[str, Any]:
        for line in self._lines:
            try:
                record = parse_json(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                self._bad_in_a_row = 0
                return record
            start = self._lines.offset - len(line)
            if not start:
                check_encoding(line, self._url)
            if not is_blank(line):
                self._count_bad(start)
        raise StopIteration

    def _count_bad(self, start: int) -> None:
        self.bad += 1
        self._bad_in_a_row += 1
        if self.bad <= _LOGGED:
            logger.warning("%s: the line at byte %d is no JSON object and is left out", self._url, start)
        if self._bad_in_a_row >= BAD_IN_A_ROW:
            raise DataError(f"{self._url}: {BAD_IN_A_ROW} lines in a row are no JSON objects: is it a JSONL file?")


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
                except (EOFError, cbor2.CBORDecodeEOF):  # since cbor2 6 its own is no EOFError
                    self._held.seek(start)
                except cbor2.CBORError as error:
                    raise DataError(f"{self._url}: the item at byte {self.place} is not valid CBOR: {error}") from error
                else:
                    self.place += self._held.tell() - start
                    if not isinstance(record, dict):
                        raise DataError(f"{self._url}: expected maps, got {type(record).__name__} before {self.place}")
                    return record
            self._more()

    def _more(self) -> None:
        """Double the buffered bytes, so that a long item is decoded a few times only."""
        held = [self._held.read()]
        size = len(held[0])
        wanted = 2 * size + 1
        while size < wanted and (piece := self._pieces.read()):
            held.append(piece)
            size += len(piece)
        if size == len(held[0]):
            if size:
                raise DataError(f"{self._url}: ends in the middle of the item at byte {self.place}: it is truncated")
            raise StopIteration
        self._held, self._size = io.BytesIO(b"".join(held)), size


class Parquet(Records):
    """Rows of a parquet file as dictionaries; a position is a row group and a row in it.

    Args:
        part: which part, of how many, of the row groups to read.

    Raises:
        DataError: it is no parquet file, or is truncated.
    """

    def __init__(self, file: BinaryIO, url: str, place: tuple[int, int], part: tuple[int, int] = (0, 1)) -> None:
        from tplr.records.parquet import ParquetReader

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
        return next(self._rows)

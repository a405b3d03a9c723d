"""Records of a file one after the other, each with the place where it ended: JSONL, CBOR, parquet."""

import io
import json
from abc import ABC, abstractmethod
from typing import Any, BinaryIO, Literal

from tplr.errors import DataError
from tplr.logging import logger
from tplr.streams.sources.bytes import Pieces
from tplr.streams.sources.compression import compression_of
from tplr.urls import file_name

FileFormat = Literal["auto", "jsonl", "cbor", "parquet"]
FORMATS = ("auto", "jsonl", "cbor", "parquet")

BAD_IN_A_ROW = 10
_LOGGED = 10  # bad records of one file that the log names; all are counted


class Records(ABC):
    """``read`` gives the next record; StopIteration at the end.

    Attributes:
        place: where the record last given ended, in JSON: reading on from there gives the next one.
        bad: records left out so far.
    """

    place: Any
    bad: int = 0

    @abstractmethod
    def read(self) -> dict[str, Any]: ...


def format_of(url: str, given: FileFormat) -> Literal["jsonl", "cbor", "parquet"]:
    """A file's format, as given or by its name, with or without a compression's suffix. Raises DataError."""
    if given != "auto":
        return given
    name, _ = compression_of(file_name(url))
    for suffix in ("jsonl", "cbor", "parquet"):
        if name.endswith(f".{suffix}"):
            return suffix  # pyright: ignore[reportReturnType]
    raise DataError(f'{url}: the name does not tell the format; say format="jsonl", "cbor" or "parquet"')


class JsonLines(Records):
    """One JSON object a line. Blank lines are skipped; others that are none are counted and left out, and ten of them
    in a row are an error."""

    def __init__(self, pieces: Pieces, url: str, offset: int) -> None:
        self._pieces = pieces
        self._url = url
        self.place = offset
        self._lines: list[bytes] = []  # whole ones, last first
        self._rest: list[bytes] = []  # parts of the line that has not ended yet
        self._bad_in_a_row = 0

    def read(self) -> dict[str, Any]:
        while True:
            line = self._lines.pop() if self._lines else self._more()
            start = self.place
            self.place = start + len(line)
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                self._bad_in_a_row = 0
                return record
            if line.isspace():
                continue
            if start == 0 and line.startswith(b"\xef\xbb\xbf"):  # a byte order mark
                self._lines.append(line[3:])
                self.place = 3
                continue
            self._count_bad(start)

    def _more(self) -> bytes:
        while piece := self._pieces.read():
            lines = piece.splitlines(keepends=True) if b"\r" not in piece else _lines(piece)
            if not lines[0].endswith(b"\n"):
                self._rest.append(lines[0])
                continue
            lines[0] = b"".join([*self._rest, lines[0]])
            self._rest = [] if lines[-1].endswith(b"\n") else [lines.pop()]
            self._lines = lines[::-1]
            return self._lines.pop()
        line, self._rest = b"".join(self._rest), []
        if not line:
            raise StopIteration
        return line

    def _count_bad(self, start: int) -> None:
        self.bad += 1
        self._bad_in_a_row += 1
        if self.bad <= _LOGGED:
            logger.warning("%s: the line at byte %d is no JSON object and is left out", self._url, start)
        if self._bad_in_a_row >= BAD_IN_A_ROW:
            raise DataError(f"{self._url}: {BAD_IN_A_ROW} lines in a row are no JSON objects: is it a JSONL file?")


class Cbor(Records):
    """CBOR items one after the other, each a map."""

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
        """Hold as much again, so that a long item is tried a few times only."""
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
    """Rows of a parquet file as dictionaries; a place is a row group and a row of it.

    Raises:
        DataError: it is no parquet file, or breaks off.
    """

    def __init__(self, file: BinaryIO, url: str, place: tuple[int, int]) -> None:
        import pyarrow.parquet as pq

        self._url = url
        self._group, self._row = place
        try:
            self._parquet = pq.ParquetFile(file)
        except Exception as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{url}: not a parquet file that can be read: {error}") from error
        self._rows: list[dict[str, Any]] = []  # last first
        self._batches: Any = iter(())
        self._opened = False

    @property
    def place(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._group, self._row

    def read(self) -> dict[str, Any]:
        while not self._rows:
            if self._group >= self._parquet.num_row_groups:
                raise StopIteration
            if not self._opened:
                self._open_group()
            batch = next(self._batches, None)
            if batch is None:
                self._group, self._row, self._opened = self._group + 1, 0, False
            else:
                self._rows = batch.to_pylist()[::-1]
        self._row += 1
        return self._rows.pop()

    def _open_group(self) -> None:
        group = self._parquet.read_row_group(self._group)
        self._batches = iter(group.slice(self._row).to_batches(max_chunksize=256))
        self._opened = True


def _lines(piece: bytes) -> list[bytes]:
    """Lines that end at line feeds only: ``splitlines`` would end them at carriage returns, too."""
    lines = [line + b"\n" for line in piece.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines

"""Raw records of JSON Lines, JSON and parquet files in chunks, from any position on.

``tplr.records`` reads the files. Unlike a stream's reader this one parses no line: the workers do, and they report an
invalid one with the chunk that holds it.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from tplr.errors import ConfigError, DataError
from tplr.records.jsonl import READ_BYTES, LineReader, check_encoding, is_blank, parse_json
from tplr.records.parquet import ParquetReader
from tplr.stores.detect import files_of

SUFFIXES = (".jsonl", ".json", ".parquet")
_BLANK = frozenset(b" \t\n\r\v\f\xef")  # what a blank line may begin with


class RecordPosition(NamedTuple):
    """A position to resume at: a file, and in it a byte offset (JSON Lines) or a number of records (other formats).

    ``number`` is the number of the last line or record before it, counted from 1.
    """

    file: int = 0
    offset: int = 0
    number: int = 0


@dataclass(frozen=True)
class Chunk:
    """Records of one file that are sent to a worker together.

    Attributes:
        bodies: each a line of JSON, or an object.
        offsets, numbers: the position behind each, as in ``RecordPosition``.
    """

    path: str
    file: int
    bodies: list[bytes | Mapping[str, Any]]
    offsets: list[int]
    numbers: list[int]

    def after(self, index: int) -> RecordPosition:
        """The position behind a record."""
        return RecordPosition(self.file, self.offsets[index], self.numbers[index])

    def where(self, index: int) -> str:
        """File and line of a record, for messages."""
        unit = "line" if isinstance(self.bodies[index], bytes) else "record"
        return f"{self.path} {unit} {self.numbers[index]}"


def input_files(inputs: Iterable[Path]) -> list[Path]:
    """The given files, and those below given folders in natural order.

    Raises:
        ConfigError: there is none, one has an unknown suffix, or one is given twice.
    """
    files: list[Path] = []
    for given in inputs:
        if not given.exists():
            raise ConfigError(f"input {given}: no such file or folder")
        found = files_of(given, *SUFFIXES)
        if not found or found[0].suffix not in SUFFIXES:
            raise ConfigError(f"input {given}: expected files of {', '.join(SUFFIXES)}")
        files += found
    if twice := sorted({str(path) for path in files if files.count(path) > 1}):
        raise ConfigError(f"input files given twice: {', '.join(twice)}")
    if not files:
        raise ConfigError("no input files")
    return files


def chunks(files: Sequence[Path], start: RecordPosition, size: int) -> Iterator[Chunk]:
    """All records from ``start`` on, up to ``size`` at a time; blank lines are skipped.

    Raises:
        DataError: a file can't be read at all: it is not UTF-8, a ``.json`` file is no JSON, or a parquet file is
            damaged.
    """
    for file in range(start.file, len(files)):
        path = files[file]
        read = {".jsonl": _lines, ".json": _json, ".parquet": _parquet}[path.suffix]
        records = read(path, start if file == start.file else RecordPosition(file))
        while taken := [*islice(records, size)]:
            bodies, offsets, numbers = zip(*taken, strict=True)
            yield Chunk(str(path), file, [*bodies], [*offsets], [*numbers])


def parsed(body: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    """A raw record as an object.

    Raises:
        DataError: why it is none.
    """
    if not isinstance(body, bytes):
        return body
    try:
        record = parse_json(body)
    except ValueError as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"not an object, but {type(record).__name__}")
    return record


# A record, and the offset and number behind it.
_Record = tuple[bytes | Mapping[str, Any], int, int]


def _lines(path: Path, begin: RecordPosition) -> Iterator[_Record]:
    """Unparsed, as the workers parse them."""
    with path.open("rb", buffering=0) as file:
        file.seek(begin.offset)
        number, offset = begin.number, begin.offset
        reader = LineReader(partial(file.read, READ_BYTES))
        while lines := reader.read_lines():
            for line in lines:
                if not offset:
                    check_encoding(line, str(path))
                number += 1
                offset += len(line)
                if line[0] not in _BLANK or not is_blank(line):
                    yield line, offset, number


def _json(path: Path, begin: RecordPosition) -> Iterator[_Record]:
    """A list of records, or one record."""
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    records = value if isinstance(value, list) else [value]
    for number, record in enumerate(records[begin.offset :], begin.offset + 1):
        # The encoder refuses a value that is no object, with its number.
        yield record if isinstance(record, dict) else json.dumps(record).encode(), number, number


def _parquet(path: Path, begin: RecordPosition) -> Iterator[_Record]:
    try:
        with path.open("rb") as file:
            rows = ParquetReader(file)
            rows.seek(begin.offset)
            numbers = range(begin.offset + 1, sys.maxsize)
            yield from zip(rows, numbers, numbers, strict=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: damaged or no parquet file: {str(error).splitlines()[0]}") from error

"""Reads raw records of files in chunks, from any position on.

``streams.sources`` opens the files and detects their formats, as for a pipeline. Unlike a pipeline this module does not
parse lines: the workers do, and they report an invalid line with its chunk.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import pyarrow as pa

from tplr.errors import ConfigError, DataError
from tplr.records.json_list import JsonList
from tplr.records.jsonl import MAX_RECORD_BYTES, LineReader, check_encoding, is_blank, parse_json
from tplr.records.parquet import ParquetReader
from tplr.stores.detect import files_of
from tplr.stores.preprocess.sources import Sources
from tplr.streams.iterator import PipelineContext
from tplr.streams.sources.bytes import Pieces
from tplr.streams.sources.compression import COMPRESSIONS
from tplr.streams.sources.records import SUFFIXES, Cbor, format_of
from tplr.streams.sources.source_file import SourceFile, expand_pattern
from tplr.urls import Url, expand_braces, file_name, local_path, scheme_of

CHUNK_BYTES = 2**24  # a chunk ends with the record that exceeds it; several chunks are in memory for each worker
_BLANK = frozenset(b" \t\n\r\v\f\xef")  # possible first bytes of a blank line


class RecordPosition(NamedTuple):
    """A position to resume at: a file, and in it a byte offset (JSON Lines, CBOR; after decompression) or a number of
    records (JSON, parquet).

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
        bytes_read: number of stored bytes of the file up to at least the end of these records; None if not known.
    """

    path: str
    file: int
    bodies: list[bytes | Mapping[str, Any]]
    offsets: list[int]
    numbers: list[int]
    bytes_read: int | None = None

    def after(self, index: int) -> RecordPosition:
        """The position behind a record."""
        return RecordPosition(self.file, self.offsets[index], self.numbers[index])

    def where(self, index: int) -> str:
        """File and line of a record, for messages."""
        unit = "line" if isinstance(self.bodies[index], bytes) else "record"
        return f"{self.path} {unit} {self.numbers[index]}"


def input_files(inputs: Iterable[Url], context: PipelineContext) -> list[str]:
    """Return paths and URLs of the given files, with braces and patterns expanded; for folders (URLs that end in ``/``)
    the readable files below them in natural order.

    Raises:
        ConfigError: there is no file, a file has an unknown suffix, or one is given twice.
        StoreError, OSError: a bucket can't be listed.
    """
    suffixes = tuple(kind + packed for kind in SUFFIXES for packed in ("", *COMPRESSIONS))
    files: list[str] = []
    for given in (os.fspath(one) for one in inputs):
        path = local_path(given) if scheme_of(given) == "file" else None
        try:
            if path is not None and path.exists():
                found = [str(file) for file in files_of(path, *suffixes)]
            elif given.endswith("/"):
                found = [url for url in expand_pattern(context, f"{given}**") if url.endswith(suffixes)]
            else:
                found = [url for one in expand_braces(given) for url in expand_pattern(context, one)]
        except FileNotFoundError as error:
            raise ConfigError(f"input {error}") from error
        if missing := [url for url in found if scheme_of(url) == "file" and not local_path(url).exists()]:
            raise ConfigError(f"input {missing[0]}: no such file or folder")
        if unknown := [url for url in found or [given] if not file_name(url).endswith(suffixes)]:
            kinds = ", ".join(SUFFIXES)
            raise ConfigError(f"input {unknown[0]}: expected files of {kinds}, also with {', '.join(COMPRESSIONS)}")
        files += found
    if twice := sorted({path for path in files if files.count(path) > 1}):
        raise ConfigError(f"input files given twice: {', '.join(twice)}")
    if not files:
        raise ConfigError("no input files")
    return files


def chunks(sources: Sources, start: RecordPosition, size: int) -> Iterator[Chunk]:
    """All records from ``start`` on, up to ``size`` or ``CHUNK_BYTES`` at a time; blank lines are skipped.

    Raises:
        DataError: a file is unreadable: it is not UTF-8, a ``.json`` file is not JSON, or a file is damaged or has
            changed.
        StoreError, OSError: a file can't be read.
    """
    for number in range(start.file, len(sources.files)):
        file, version = sources.files[number], sources.versions[number]
        begin = start if number == start.file else RecordPosition(number)
        kind = format_of(file.url)
        if kind == "parquet":
            yield from _chunks(_parquet(file, version, begin), size, file.url, begin)
            continue
        with closing(file.pieces(0 if kind == "json" else begin.offset, version)) as pieces:
            read = {"jsonl": _lines, "json": _json, "cbor": _cbor}[kind]
            yield from _chunks(read(pieces, file.url, begin), size, file.url, begin, pieces)


# A record, the offset and number behind it, and the bytes that were read from the first record up to it, or a little
# behind it.
_Record = tuple[bytes | Mapping[str, Any], int, int, int]


def _chunks(
    records: Iterator[_Record], size: int, url: str, begin: RecordPosition, pieces: Pieces | None = None
) -> Iterator[Chunk]:
    chunk, start = Chunk(url, begin.file, [], [], []), 0
    for body, offset, number, read in records:
        chunk.bodies.append(body)
        chunk.offsets.append(offset)
        chunk.numbers.append(number)
        if len(chunk.bodies) == size or read - start >= CHUNK_BYTES:
            yield replace(chunk, bytes_read=pieces.position if pieces else None)
            chunk, start = Chunk(url, begin.file, [], [], []), read
    if chunk.bodies:
        yield replace(chunk, bytes_read=pieces.position if pieces else None)


def parsed(body: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    """Parse a raw record to an object.

    Raises:
        DataError: it is not an object; the message says why.
    """
    if not isinstance(body, bytes):
        return body
    if len(body) > MAX_RECORD_BYTES:
        raise DataError(f"a line of more than {MAX_RECORD_BYTES} bytes")
    try:
        record = parse_json(body)
    except ValueError as error:
        raise DataError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"not an object, but {type(record).__name__}")
    return record


def _lines(pieces: Pieces, url: str, begin: RecordPosition) -> Iterator[_Record]:
    """Yield unparsed lines; the workers parse them."""
    number, offset = begin.number, begin.offset
    reader = LineReader(pieces.read, max_bytes=MAX_RECORD_BYTES)
    while lines := reader.read_lines():
        offset += reader.dropped  # of the first line
        for line in lines:
            if not number:
                check_encoding(line, url)
            number += 1
            offset += len(line)
            if line[0] not in _BLANK or not is_blank(line):
                yield line, offset, number, offset - begin.offset


def _json(pieces: Pieces, url: str, begin: RecordPosition) -> Iterator[_Record]:
    elements, skipped = JsonList(pieces.read, url), 0
    for number, record in enumerate(elements, 1):
        if number <= begin.offset:
            skipped = elements.read_bytes
            continue
        # The encoder refuses a value that is not an object, and reports its number.
        body = record if isinstance(record, dict) else json.dumps(record).encode()
        yield body, number, number, elements.read_bytes - skipped


def _cbor(pieces: Pieces, url: str, begin: RecordPosition) -> Iterator[_Record]:
    records = Cbor(pieces, url, begin.offset)
    for number in count(begin.number + 1):
        try:
            record = records.read()
        except StopIteration:
            return
        yield record, records.place, number, records.place - begin.offset


def _parquet(file: SourceFile, version: str, begin: RecordPosition) -> Iterator[_Record]:
    opened, _ = file.seekable(version)
    try:
        with opened:
            rows = ParquetReader(opened)
            rows.seek(begin.offset)
            for number, row in enumerate(rows, begin.offset + 1):
                yield row, number, number, rows.decoded_bytes
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{file.url}: damaged or not a parquet file: {str(error).splitlines()[0]}") from error

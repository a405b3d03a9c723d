"""Reads documents from text, JSON Lines and parquet files, one after another, and counts unusable records.

``tplr.records`` reads JSON Lines and parquet. Unlike a stream's reader this one names the line and the reason of each
invalid record, because its user can still correct the file.

A text file is one document, a line of ``.jsonl`` another, a row of parquet as well; text and JSON lines may be
compressed (``.gz``, ``.zst``). By rule:

- Blank documents, empty files and blank lines of JSON Lines are counted and skipped.
- An invalid record raises an error with its file and line, or is counted with ``skip_bad``. Documents before it in
  the same file are delivered first.
"""

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from tplr.errors import ConfigError
from tplr.records.jsonl import MAX_RECORD_BYTES, READ_BYTES, LineReader, is_blank, parse_json
from tplr.records.parquet import ParquetReader

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


class _InvalidRecord(Exception):
    """An invalid record, with reason and detail."""


class Documents:
    """The documents of ``paths``, in order; one or two of them are in memory.

    Args:
        field: field of a JSON object, or column of a parquet file, that holds the text.
        skip_bad: count invalid records and continue.

    Attributes:
        skipped: number of skipped records and files by reason.
        bytes_read: number of stored bytes read so far.
        total_bytes: size of all files.

    Raises:
        ConfigError: while iterating: an invalid record, with its file and line.
    """

    def __init__(self, paths: Iterable[Path], *, field: str = "text", skip_bad: bool = False) -> None:
        self._paths = [*paths]
        self._field = field
        self._skip_bad = skip_bad
        self._finished = 0
        self._open: BinaryIO | None = None
        self.skipped: Counter[str] = Counter()
        self.total_bytes = sum(path.stat().st_size for path in self._paths)

    @property
    def bytes_read(self) -> int:
        return self._finished + (self._open.tell() if self._open else 0)

    def __iter__(self) -> Iterator[str]:
        for path in self._paths:
            size = path.stat().st_size
            if size:
                yield from self._file(path)
            else:
                self.skipped["empty file"] += 1
            self._finished += size

    def _file(self, path: Path) -> Iterator[str]:
        readers = {"text": self._text, "json lines": self._json_lines, "parquet": self._parquet}
        kind, compression = _kind(path)
        try:
            with path.open("rb") as self._open:
                plain = pa.CompressedInputStream(self._open, compression) if compression else self._open
                for text in readers[kind](io.BufferedReader(plain), path):  # pyright: ignore[reportArgumentType]
                    if text and not text.isspace():
                        yield text
                    else:
                        self.skipped["empty document"] += 1
        except OSError as error:
            self._bad(str(path), "unreadable or cut off", str(error))
        finally:
            self._open = None

    def _bad(self, where: str, reason: str, detail: str = "") -> None:
        if not self._skip_bad:
            raise ConfigError(f"{where}: {reason}{f' ({detail})' if detail else ''}; fix it or leave it out")
        self.skipped[reason] += 1

    def _text(self, file: io.BufferedReader, path: Path) -> Iterator[str]:
        data = file.read(MAX_RECORD_BYTES + 1)
        if len(data) > MAX_RECORD_BYTES:
            self._bad(str(path), f"a text of more than {MAX_RECORD_BYTES} bytes: cut it, or make it JSON lines")
            return
        try:
            yield data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            self._bad(f"{path} line {line}", "not UTF-8", error.reason)

    def _json_lines(self, file: io.BufferedReader, path: Path) -> Iterator[str]:
        lines = LineReader(partial(file.read1, READ_BYTES), max_bytes=MAX_RECORD_BYTES)
        for line in lines:
            if len(line) > MAX_RECORD_BYTES:
                self._bad(f"{path} line {lines.number}", f"a line of more than {MAX_RECORD_BYTES} bytes")
                continue
            try:
                yield self._json_text(line)
            except _InvalidRecord as error:
                if is_blank(line):
                    self.skipped["blank line"] += 1
                else:
                    self._bad(f"{path} line {lines.number}", *error.args)

    def _json_text(self, line: bytes) -> str:
        try:
            record = parse_json(line)
        except UnicodeDecodeError as error:
            raise _InvalidRecord("not UTF-8", error.reason) from error
        except ValueError as error:
            raise _InvalidRecord("not JSON", str(error)) from error
        text = record.get(self._field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = "none" if text is None else type(text).__name__
            raise _InvalidRecord(f"expected a JSON object with a text in field {self._field!r}", f"found {found}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _InvalidRecord("lone surrogate, which UTF-8 can't encode", f"at {error.start}") from error
        return text

    def _parquet(self, file: io.BufferedReader, path: Path) -> Iterator[str]:
        try:
            rows = ParquetReader(file, columns=[self._field], values=_first_column, verify=True)
            if self._field not in rows.schema.names:
                return self._bad(str(path), f"no column {self._field!r}", f"only {', '.join(rows.schema.names)}")
            kind = rows.schema.field(self._field).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                return self._bad(str(path), f"column {self._field!r} holds {kind}, expected text")
            for number, text in enumerate(rows, 1):
                if text is None:
                    self._bad(f"{path} row {number}", "a row without text")
                else:
                    yield text
        except (pa.ArrowException, UnicodeDecodeError) as error:
            self._bad(str(path), "unreadable or damaged parquet", str(error).splitlines()[0])


def text_files(source: Path) -> tuple[list[Path], int]:
    """Return the files below a folder that ``Documents`` reads, sorted by path, and the number of other files.

    A file yields itself.

    Raises:
        ConfigError: there is no such file, or the file has an unknown suffix.
    """
    if source.is_file():
        found, others = [source], 0
    elif source.is_dir():
        files = [path for path in source.rglob("*") if path.is_file()]
        found = sorted((path for path in files if _kind(path)[0]), key=lambda path: path.relative_to(source).as_posix())
        others = len(files) - len(found)
    else:
        raise ConfigError(f"{source}: no such file or folder")
    if not found or not all(_kind(path)[0] for path in found):
        kinds = ", ".join((*TEXT_SUFFIXES, ".jsonl"))
        raise ConfigError(f"{source}: no text in it; expected files of {kinds} (or with .gz, .zst), or .parquet")
    return found, others


def split_rows(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Splits texts at line ends into rows of at most ``characters``; longer lines are split anywhere."""
    for text in texts:
        piece = ""
        for line in text.splitlines(keepends=True):
            if len(piece) + len(line) > characters:
                if piece.strip():
                    yield piece.rstrip()
                piece = ""
            rest = max(len(line) - 1, 0) // characters * characters
            yield from (cut for i in range(0, rest, characters) if (cut := line[i : i + characters]).strip())
            piece += line[rest:]
        if piece.strip():
            yield piece.rstrip()


def _first_column(batch: pa.RecordBatch) -> list[str | None]:
    return batch.column(0).to_pylist()


def _kind(path: Path) -> tuple[str, str | None]:
    """Return a file's format by its suffix ("" if unknown), and its compression."""
    compression = _COMPRESSIONS.get(path.suffix)
    suffix = path.with_suffix("").suffix if compression else path.suffix
    if suffix == ".parquet" and not compression:
        return "parquet", None
    return {".jsonl": "json lines", **dict.fromkeys(TEXT_SUFFIXES, "text")}.get(suffix, ""), compression

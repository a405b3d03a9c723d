"""One file of ``from_files``: opened at its first record, at any position."""

from typing import Any, BinaryIO

from tplr.streams.iterator import State
from tplr.streams.sources.bytes import Pieces
from tplr.streams.sources.records import Cbor, FileFormat, Json, JsonLines, Parquet, Records, format_of
from tplr.streams.sources.source_file import SourceFile
from tplr.streams.state import StateReader


class SourceShard:
    """Records of ``file`` from the position of a state on.

    Args:
        max_bad_fraction: see ``BadRecords``; below 1 the state holds the file's counts.
        part: number of the part of a parquet file to read, and the number of parts.

    Raises, when read:
        DataError: the file does not have its format, is truncated, has too many bad records, or has another version
            than in the state.
        StoreError, OSError: the file can't be read.
    """

    def __init__(
        self,
        file: SourceFile,
        file_format: FileFormat,
        max_bad_fraction: float = 1.0,
        part: tuple[int, int] = (0, 1),
        saved: StateReader | None = None,
    ) -> None:
        self._source, self._max_bad_fraction, self._part = file, max_bad_fraction, part
        self._format = format_of(file.url, file_format)
        self._version = ""
        self._place: Any = [0, 0] if self._format == "parquet" else 0
        self._counts: tuple[int, int] = (0, 0)
        if saved:
            self._version = saved.text("version")
            parquet = self._format == "parquet"
            self._place = saved.integers("place", length=2) if parquet else saved.integer("place", high=self._end())
            if saved.has("counts"):
                records, bad = saved.integers("counts", length=2)
                self._counts = records, bad
        self._pieces: Pieces | None = None
        self._file: BinaryIO | None = None
        self._records: Records | None = None

    @property
    def bad(self) -> int:
        return 0 if self._records is None else self._records.bad

    def prepare(self) -> None:
        """Start to fetch, if the file is remote."""
        if self._pieces is None and self._format != "parquet" and self._source.scheme != "file":
            self._pieces = self._open_pieces()
            self._pieces.prepare()

    def read(self) -> dict[str, Any]:
        """Return the next record; raise StopIteration at the end."""
        if self._records is None:
            self._records = self._open()
        return self._records.read()

    def state(self) -> State:
        place = self._place if self._records is None else self._records.place
        version = self._pieces.version if self._pieces is not None else self._version
        state = {"place": list(place) if isinstance(place, tuple) else place, "version": version or self._version}
        if self._max_bad_fraction < 1:
            state["counts"] = list(self._counts if self._records is None else self._records.counts)
        return state

    def close(self) -> None:
        for opened in (self._pieces, self._file):
            if opened is not None:
                opened.close()

    def _end(self) -> int | None:
        """Return the last position in a file of the state's version; None if it is not known."""
        size = self._version.partition(":")[0]
        in_bytes = self._format in ("jsonl", "cbor") and not self._source.compression
        return int(size) if in_bytes and size.isdecimal() else None

    def _open(self) -> Records:
        if self._format == "parquet":
            group, row = self._place
            self._file, self._version = self._source.seekable(self._version)
            return Parquet(self._file, self._source.url, (group, row), self._part)
        if self._pieces is None:
            self._pieces = self._open_pieces()
        if self._format == "cbor":
            return Cbor(self._pieces, self._source.url, self._place)
        return (JsonLines if self._format == "jsonl" else Json)(
            self._pieces,
            self._source.url,
            self._place,
            max_bad_fraction=self._max_bad_fraction,
            counts=self._counts,
        )

    def _open_pieces(self) -> Pieces:
        # The elements of a JSON file are known only when all of it is read.
        return self._source.pieces(0 if self._format == "json" else self._place, self._version)

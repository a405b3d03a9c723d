"""One file of ``from_files``: opened at its first record, at any position."""

import tempfile
from pathlib import Path
from typing import Any, BinaryIO, cast

from tplr.streams.iterator import PipelineContext, State
from tplr.streams.sources.bytes import InflatedPieces, LocalPieces, Pieces
from tplr.streams.sources.compression import Compression, compression_of
from tplr.streams.sources.others import OtherPieces, Threads, open_at
from tplr.streams.sources.records import Cbor, FileFormat, JsonLines, Parquet, Records, format_of
from tplr.streams.state import StateReader
from tplr.urls import STORE_SCHEMES, check_version, file_name, local_path, scheme_of


class SourceShard:
    """Records of ``url`` from the position of ``state`` on; ``part``, of a parquet file, is one of several parts.

    Raises, when read:
        DataError: the file is not of its format, is truncated, or has another version than the state says.
        StoreError, OSError: the file can't be read.
    """

    def __init__(  # noqa: PLR0917
        self,
        context: PipelineContext,
        url: str,
        file_format: FileFormat,
        timeout: float,
        ahead: bool,
        part: tuple[int, int] = (0, 1),
        saved: StateReader | None = None,
    ) -> None:
        self._context, self._url, self._timeout, self._ahead = context, url, timeout, ahead
        self._format = format_of(url, file_format)
        self._compression: Compression | None = compression_of(file_name(url))[1]
        self._part = part
        self._version = saved.text("version") if saved else ""
        self._place: Any = [0, 0] if self._format == "parquet" else 0
        if saved:
            parquet = self._format == "parquet"
            self._place = saved.integers("place", length=2) if parquet else saved.integer("place", high=self._size())
        self._pieces: Pieces | None = None
        self._file: BinaryIO | None = None
        self._records: Records | None = None

    @property
    def bad(self) -> int:
        return 0 if self._records is None else self._records.bad

    def prepare(self) -> None:
        """Start to fetch, if the file is remote."""
        if self._pieces is None and self._format != "parquet" and scheme_of(self._url) != "file":
            self._pieces = self._open_pieces()
            self._pieces.prepare()

    def read(self) -> dict[str, Any]:
        """The next record; StopIteration at the end."""
        if self._records is None:
            self._records = self._open()
        return self._records.read()

    def state(self) -> State:
        place = self._place if self._records is None else self._records.place
        version = self._pieces.version if self._pieces is not None else self._version
        return {"place": list(place) if isinstance(place, tuple) else place, "version": version or self._version}

    def close(self) -> None:
        for opened in (self._pieces, self._file):
            if opened is not None:
                opened.close()

    def _size(self) -> int | None:
        """Bytes of the file that the state was taken in, if they limit a position in it."""
        size = self._version.partition(":")[0]
        return int(size) if size.isdecimal() and self._compression is None else None

    def _open(self) -> Records:
        if self._format == "parquet":
            group, row = self._place
            self._file = self._open_file()
            return Parquet(self._file, self._url, (group, row), self._part)
        if self._pieces is None:
            self._pieces = self._open_pieces()
        return (JsonLines if self._format == "jsonl" else Cbor)(self._pieces, self._url, self._place)

    def _open_pieces(self, whole: bool = False) -> Pieces:
        offset = 0 if whole or self._compression else self._place
        scheme = scheme_of(self._url)
        pieces: Pieces
        if scheme == "file":
            pieces = LocalPieces(local_path(self._url), offset, self._version)
        elif scheme in STORE_SCHEMES:
            from tplr.storage.blocking import BucketConnections
            from tplr.streams.sources.objects import StorePieces

            stores = self._context.shared(BucketConnections)
            pieces = StorePieces(stores, self._url, offset, self._version, self._timeout, self._ahead)
        else:
            pieces = OtherPieces(self._context.shared(Threads), self._url, offset, self._timeout, self._ahead)
        if self._compression is None:
            return pieces
        return InflatedPieces(pieces, self._compression, self._url, 0 if whole else self._place)

    def _open_file(self) -> BinaryIO:
        """A seekable parquet file; a compressed one is first decompressed to an anonymous temporary file."""
        scheme = scheme_of(self._url)
        if self._compression is not None:
            file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - close() does
            self._pieces = self._open_pieces(whole=True)
            while piece := self._pieces.read():
                file.write(piece)
            file.seek(0)
            return file
        if scheme == "file":
            path: Path = local_path(self._url)
            version = str(path.stat().st_size)
            check_version(self._url, self._version, version)
            self._version = version
            return path.open("rb")
        if scheme in STORE_SCHEMES:
            from tplr.storage.blocking import BucketConnections, open_ranged

            file, self._version = open_ranged(
                self._context.shared(BucketConnections), self._url, self._timeout, self._version
            )
            return cast(BinaryIO, file)
        return open_at(self._url, 0)

"""Reads a file in pieces from any offset: from disk, or from a remote source with one piece of read-ahead."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from itertools import repeat
from pathlib import Path

from tplr.concurrency.read_ahead import ReadAhead
from tplr.streams.sources.compression import Compression, Decompressor
from tplr.urls import check_version, local_version

# Bytes. Pieces grow: small ones give the first record soon, large ones give full throughput.
FIRST_PIECE, MAX_PIECE = 2**16, 2**20
FIRST_FETCHED, MAX_FETCHED = 2**16, 2**22


class Pieces(ABC):
    """``read`` returns the next bytes; at the end empty bytes, at every call.

    Attributes:
        version: identifies the file's content, as in ``tplr.urls.version_of``. Empty until it is known.
        position: offset in the file after the bytes read so far; for a compressed file, in its compressed bytes.
    """

    version: str = ""
    position: int = 0

    @abstractmethod
    def read(self) -> bytes: ...

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Start to fetch, if that takes time, before ``read`` is called."""

    @abstractmethod
    def close(self) -> None: ...


class LocalPieces(Pieces):
    """A file on this machine.

    Raises:
        DataError: the file's version is not ``version``.
    """

    def __init__(self, path: Path, offset: int, version: str) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        try:
            if version:
                check_version(str(path), version, self.version)
        except BaseException:
            self._file.close()
            raise
        self.position = self._file.seek(offset)
        self._piece = FIRST_PIECE

    @cached_property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - hashed only for a state
        if not self._file.closed:
            return local_version(self._file.fileno())
        with self._path.open("rb") as file:
            return local_version(file.fileno())

    def read(self) -> bytes:
        data = self._file.read(self._piece)
        self.position += len(data)
        self._piece = min(2 * self._piece, MAX_PIECE)
        return data

    def close(self) -> None:
        self._file.close()


class FetchedPieces(Pieces):
    """Pieces of a remote file; the next piece is fetched while the current one is used.

    Args:
        submit: starts to fetch the next piece; after a failure, the same piece again.
        offset: offset of the first piece.
        ahead: fetch before ``read`` is called.
    """

    def __init__(self, submit: Callable[[], "Future[bytes]"], offset: int, ahead: bool) -> None:
        self.position = offset
        self._ahead = ahead
        self._next = ReadAhead(repeat(None), lambda _: submit(), depth=1)
        self._ended = False

    def prepare(self) -> None:
        if self._ahead and not self._ended:
            self._next.fill()

    def read(self) -> bytes:
        if self._ended:
            return b""
        data = next(self._next)[1].result()
        self.position += len(data)
        self._ended = not data
        self.prepare()
        return data

    def close(self) -> None:
        self._ended = True
        self._next.close()


class InflatedPieces(Pieces):
    """Decompressed content of a file from a decompressed offset on; preceding bytes are read and discarded."""

    def __init__(self, pieces: Pieces, kind: Compression, url: str, offset: int) -> None:
        self._pieces = pieces
        self._decompressor = Decompressor(pieces.read, kind, url)
        self._skip = offset

    @property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - that of the compressed file
        return self._pieces.version

    @property
    def position(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._pieces.position

    def prepare(self) -> None:
        self._pieces.prepare()

    def read(self) -> bytes:
        while data := self._decompressor.read():
            if self._skip:
                cut = min(self._skip, len(data))
                self._skip -= cut
                data = data[cut:]
            if data:
                break
        return data

    def close(self) -> None:
        self._pieces.close()

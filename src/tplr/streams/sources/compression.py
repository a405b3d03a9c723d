"""Streaming decompression of gz, bz2, xz and zst files, including files with several members."""

import bz2
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import zstandard

from tplr.errors import DataError
from tplr.streams.sources.zstd_frame import ZstdFrame

Compression = Literal["gz", "bz2", "xz", "zst"]

MAX_XZ_MEMORY = 2**28  # bytes, of which a file chooses how many it needs; ``xz -9`` needs 65 MiB
MAX_OUTPUT = 2**22  # bytes that are decompressed at a time: a file of a few KB can hold gigabytes
_INPUT = 2**20  # bytes that are given to a library at a time; some copy what they leave


class _GzipMember:
    """Has the interface of ``bz2.BZ2Decompressor``."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    def decompress(self, data: bytes | memoryview, max_length: int) -> bytes:
        rest = self._member.unconsumed_tail
        return self._member.decompress(rest + data if rest else data, max_length)


_NEW: dict[Compression, Callable[[], Any]] = {
    "gz": _GzipMember,
    "bz2": bz2.BZ2Decompressor,
    "xz": partial(lzma.LZMADecompressor, memlimit=MAX_XZ_MEMORY),
    "zst": ZstdFrame,
}


_KINDS: dict[str, Compression] = {kind: kind for kind in _NEW}
COMPRESSIONS = tuple(f".{kind}" for kind in _KINDS)


def compression_of(name: str) -> tuple[str, Compression | None]:
    """Return a file's name without its compression suffix, and the compression."""
    stem, _, suffix = name.rpartition(".")
    return (stem, _KINDS[suffix]) if suffix in _KINDS else (name, None)


class Decompressor:
    """Decompresses the bytes that ``read`` returns until it returns none. After an error of ``read`` the next call
    continues there.

    Raises, when read:
        DataError: the bytes are not of this compression, need too much memory, or the file is truncated.
    """

    def __init__(self, read: Callable[[], bytes], kind: Compression, url: str) -> None:
        self._read = read
        self._kind: Compression = kind
        self._url = url
        self._piece, self._at = b"", 0  # bytes that ``read`` returned, and how many of them were used
        self._member: Any = None  # None between two members
        self._begun = False  # a member has begun
        self._full = False  # the member may have more output without more input

    def read(self) -> bytes:
        """Return the next bytes, at most ``MAX_OUTPUT`` and for zst two blocks more; none at the end."""
        while self._full or self._at < len(self._piece) or self._next_piece():
            if self._member is None and not self._next_member():
                continue
            member = cast(Any, self._member)
            given = memoryview(self._piece)[self._at : self._at + (0 if self._full else _INPUT)]
            try:
                data = member.decompress(given, MAX_OUTPUT)
            except (zlib.error, OSError, EOFError, lzma.LZMAError, zstandard.ZstdError) as error:
                if isinstance(error, lzma.LZMAError) and "Memory usage limit" in str(error):
                    raise DataError(
                        f"{self._url}: needs more than {MAX_XZ_MEMORY} bytes of memory, the most that is given: "
                        "compress it with a smaller dictionary"
                    ) from error
                raise DataError(f"{self._url}: not valid {self._kind}: {error}") from error
            self._at += len(given)
            self._full = len(data) >= MAX_OUTPUT
            if member.eof:
                self._at -= len(member.unused_data)
                self._member, self._full = None, False
            if data:
                return data
        return b""

    def _next_piece(self) -> bool:
        """Read the next piece; False at the end, which must be that of a member."""
        self._piece, self._at = self._read(), 0
        if self._piece:
            return True
        if not self._begun:
            raise DataError(f"{self._url}: has no bytes, not even a {self._kind} header: write the file again")
        if self._member is not None:
            raise DataError(f"{self._url}: ends in the middle of its {self._kind} data: the file is truncated")
        return False

    def _next_member(self) -> bool:
        """Begin the next member; False if only zeros are left of the piece."""
        if self._piece[self._at] == 0:
            if not self._begun:  # of the libraries, one takes zeros for an empty file
                raise DataError(f"{self._url}: not valid {self._kind}: it begins with zeros")
            # After a member zeros may pad a file to whole tape blocks.
            self._at = len(self._piece) - len(self._piece[self._at :].lstrip(b"\0"))
            if self._at == len(self._piece):
                return False
        self._member, self._begun = _NEW[self._kind](), True
        return True

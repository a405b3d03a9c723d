"""Streaming decompression of gz, bz2, xz and zst files, including files with several members."""

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any, Literal

import zstandard

from tplr.errors import DataError

Compression = Literal["gz", "bz2", "xz", "zst"]

# Bytes; the largest window of ``zstd --long``. The library's own limit is 128 MiB.
_ZSTD_WINDOW = 2**31

_NEW: dict[Compression, Callable[[], Any]] = {
    "gz": lambda: zlib.decompressobj(wbits=31),
    "bz2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
    "zst": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
}


_KINDS: dict[str, Compression] = {kind: kind for kind in _NEW}
COMPRESSIONS = tuple(f".{kind}" for kind in _KINDS)


def compression_of(name: str) -> tuple[str, Compression | None]:
    """Return a file's name without its compression suffix, and the compression."""
    stem, _, suffix = name.rpartition(".")
    return (stem, _KINDS[suffix]) if suffix in _KINDS else (name, None)


class Decompressor:
    """``feed`` decompresses a piece; ``finish`` checks that the file is complete.

    Raises:
        DataError: the bytes are not of this compression, or the file is truncated.
    """

    def __init__(self, kind: Compression, url: str) -> None:
        self._kind: Compression = kind
        self._url = url
        self._member: Any = None  # None between two members
        self._begun = False  # a member has begun

    def feed(self, piece: bytes) -> bytes:
        out = []
        while piece:
            if self._member is None:
                # After a member zeros may pad a file to whole tape blocks.
                if self._begun and not (piece := piece.lstrip(b"\0")):
                    break
                if piece[0] == 0:  # of the libraries, one takes zeros for an empty file
                    raise DataError(f"{self._url}: not valid {self._kind}: it begins with zeros")
                self._member, self._begun = _NEW[self._kind](), True
            try:
                out.append(self._member.decompress(piece))
            except (zlib.error, OSError, EOFError, lzma.LZMAError, zstandard.ZstdError) as error:
                raise DataError(f"{self._url}: not valid {self._kind}: {error}") from error
            piece = b""
            if self._member.eof:
                piece = self._member.unused_data
                self._member = None
        return b"".join(out)

    def finish(self) -> None:
        if not self._begun:
            raise DataError(f"{self._url}: has no bytes, not even a {self._kind} header: write the file again")
        if self._member is not None:
            raise DataError(f"{self._url}: ends in the middle of its {self._kind} data: the file is truncated")

"""Splits large objects into parts, and computes digests of parts. These pure functions never change."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MIB = 2**20
MIN_PART_BYTES = 16 * MIB
# R2 and S3 allow 10,000.
MAX_PARTS = 9000

# User metadata of multipart objects: ``part_bytes`` gives the length of their parts.
PART_RULE = {"part-rule": "1"}


@dataclass(frozen=True)
class FilePart:
    """Bytes ``[start, stop)`` of an object; ``number`` counts from 1, as S3 does."""

    number: int
    start: int
    stop: int


def part_bytes(size: int) -> int:
    """Return the length of all parts but the last, in whole MiB. R2 requires equal lengths."""
    whole_mib = -(-size // (MAX_PARTS * MIB)) * MIB
    return max(MIN_PART_BYTES, whole_mib)


def cut(size: int) -> list[FilePart]:
    """Return the parts of an object of ``size`` bytes; [] if it is empty."""
    step = part_bytes(size)
    starts = range(0, size, step)
    return [FilePart(number, start, min(start + step, size)) for number, start in enumerate(starts, 1)]


def count_parts(size: int) -> int:
    """Return the number of parts that ``cut`` returns."""
    return -(-size // part_bytes(size))


class Hash(Protocol):
    """A hash object as in ``hashlib``."""

    def update(self, data: memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


class PartHashes:
    """Hashes each part of ``size`` bytes; the parts arrive in order, in pieces of any length."""

    def __init__(self, size: int, new: Callable[[], Hash]) -> None:
        self._part_bytes = part_bytes(size)
        self._new = new
        self._hashes: list[Hash] = []
        self._room = 0

    def update(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            if not self._room:
                self._hashes.append(self._new())
                self._room = self._part_bytes
            piece, rest = rest[: self._room], rest[self._room :]
            self._hashes[-1].update(piece)
            self._room -= len(piece)

    def hexdigests(self) -> tuple[str, ...]:
        """Return the digests of the parts begun so far."""
        return tuple(one.hexdigest() for one in self._hashes)


def md5_hex(data: bytes | memoryview) -> str:
    """Return the MD5, S3's digest of an object or a part; 32 hex digits. Detects damage, not forgery."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def body_etag(data: bytes, *, like: str) -> str:
    """Return the ETag of ``data`` if stored in the way of the ETag ``like``: in one PUT, or in the parts of ``cut``."""
    if "-" not in like:
        return md5_hex(data)
    view = memoryview(data)
    return multipart_etag([md5_hex(view[part.start : part.stop]) for part in cut(len(data))])


def multipart_etag(md5s: Sequence[str]) -> str:
    """Return the ETag of a multipart object: MD5 of the parts' binary MD5s, a dash, their number."""
    return f"{md5_hex(b''.join(map(bytes.fromhex, md5s)))}-{len(md5s)}"

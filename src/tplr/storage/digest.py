"""What an object's bytes are checked against, hashed piece by piece in order."""

import hashlib
from typing import Protocol

from tplr.schemas import ObjectInfo
from tplr.storage.parts import PART_RULE, multipart_etag, part_bytes


class Digest(Protocol):
    """``update`` with each piece in turn, none across the border of two parts, then ask for ``damage``.

    Attributes:
        tells: whether it finds any damage at all.
    """

    tells: bool

    def update(self, data: memoryview) -> None: ...

    def damage(self) -> str | None:
        """What is wrong with the bytes; None if nothing is."""
        ...


def digest_of(info: ObjectInfo, sha256: str | None) -> Digest:
    """The best that can be checked: ``sha256`` (64 hex digits) if given, else the ETag if its rule is known."""
    if sha256 is not None:
        return _Whole("sha256", sha256)
    if "-" not in info.etag:
        return _Whole("md5", info.etag)
    if PART_RULE.items() <= info.metadata.items():
        return _OfParts(info.etag, part_bytes(info.size))
    return _Nothing()


class _Whole:
    tells = True

    def __init__(self, algorithm: str, expected: str) -> None:
        self._hash = hashlib.new(algorithm, usedforsecurity=False)
        self._expected = expected

    def update(self, data: memoryview) -> None:
        self._hash.update(data)

    def damage(self) -> str | None:
        return _difference(self._hash.name, self._hash.hexdigest(), self._expected)


class _OfParts:
    """The ETag of an object that ``upload_file`` put together."""

    tells = True

    def __init__(self, etag: str, part_bytes: int) -> None:
        self._parts: list[hashlib._Hash] = []
        self._part_bytes = part_bytes
        self._filled = part_bytes
        self._expected = etag

    def update(self, data: memoryview) -> None:
        if self._filled == self._part_bytes:
            self._parts.append(hashlib.md5(usedforsecurity=False))
            self._filled = 0
        self._parts[-1].update(data)
        self._filled += len(data)

    def damage(self) -> str | None:
        found = multipart_etag([part.hexdigest() for part in self._parts])
        return _difference("md5 of the parts", found, self._expected)


class _Nothing:
    """Somebody else's parts, of lengths that the ETag does not tell."""

    tells = False

    def update(self, data: memoryview) -> None:
        pass

    def damage(self) -> str | None:
        return None


def _difference(name: str, found: str, expected: str) -> str | None:
    return None if found == expected else f"{name} is {found}, expected {expected}"

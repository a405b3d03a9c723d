"""What an object's bytes are checked against, hashed part by part in order."""

import hashlib
from typing import Protocol

from tplr.schemas import ObjectInfo
from tplr.storage.parts import PART_RULE, md5_hex, multipart_etag


class Digest(Protocol):
    """``update`` with each part in turn, then ask for ``damage``."""

    def update(self, data: bytes) -> None: ...

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
        return _OfParts(info.etag)
    return _Nothing()


class _Whole:
    def __init__(self, algorithm: str, expected: str) -> None:
        self._hash = hashlib.new(algorithm, usedforsecurity=False)
        self._expected = expected

    def update(self, data: bytes) -> None:
        self._hash.update(data)

    def damage(self) -> str | None:
        return _difference(self._hash.name, self._hash.hexdigest(), self._expected)


class _OfParts:
    """The ETag of an object that ``upload_file`` put together."""

    def __init__(self, etag: str) -> None:
        self._md5s: list[str] = []
        self._expected = etag

    def update(self, data: bytes) -> None:
        self._md5s.append(md5_hex(data))

    def damage(self) -> str | None:
        return _difference("md5 of the parts", multipart_etag(self._md5s), self._expected)


class _Nothing:
    """Somebody else's parts, of lengths that the ETag does not tell."""

    def update(self, data: bytes) -> None:
        pass

    def damage(self) -> str | None:
        return None


def _difference(name: str, found: str, expected: str) -> str | None:
    return None if found == expected else f"{name} is {found}, expected {expected}"

"""Conditional headers and Range: pure functions of a header and the current object."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from tplr.testing.s3server.errors import S3Error

if TYPE_CHECKING:
    from tplr.testing.s3server.objects import StoredObject


@dataclass(frozen=True)
class Conditions:
    """ETags have no quotes or are ``*``; empty if the header was not sent. Times are unix seconds.

    As in HTTP, a time is ignored if it cannot be parsed, or if the corresponding ETag header was sent.
    """

    if_match: tuple[str, ...] = ()
    if_none_match: tuple[str, ...] = ()
    modified_since: float | None = None
    unmodified_since: float | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "Conditions":
        return cls(
            _etags(headers.get("If-Match", "")),
            _etags(headers.get("If-None-Match", "")),
            _seconds(headers.get("If-Modified-Since", "")),
            _seconds(headers.get("If-Unmodified-Since", "")),
        )

    def check_read(self, found: "StoredObject") -> None:
        """Checks a read of an existing object: raises PreconditionFailed (412) or NotModified (304)."""
        self._check_wanted(found)
        if self._excludes(found):
            raise S3Error("NotModified", "The object has not changed.", {"ETag": f'"{found.etag}"'})

    def check_write(self, found: "StoredObject | None") -> None:
        """Checks a write; ``found`` is the object that it would replace. Raises PreconditionFailed."""
        self._check_wanted(found)
        if found is not None and self._excludes(found):
            raise S3Error("PreconditionFailed", "The object exists; a condition of the request excludes it.")

    def _check_wanted(self, found: "StoredObject | None") -> None:
        if self.if_match:
            wanted = found is not None and _matches(self.if_match, found.etag)
        else:
            wanted = found is None or self.unmodified_since is None or _stamp(found) <= self.unmodified_since
        if not wanted:
            raise S3Error("PreconditionFailed", "The object does not match a condition of the request.")

    def _excludes(self, found: "StoredObject") -> bool:
        if self.if_none_match:
            return _matches(self.if_none_match, found.etag)
        return self.modified_since is not None and _stamp(found) <= self.modified_since


def read_range(header: str | None, size: int) -> tuple[int, int] | None:
    """``(start, length)`` of one ``bytes=`` range of an object of ``size`` bytes, or None for the whole object.

    As in HTTP, a header that is not a single byte range is ignored.

    Raises:
        S3Error: InvalidRange (416), no byte of the range exists.
    """
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", header or "", re.ASCII)
    if match is None or match[0] == "bytes=-" or (match[1] and match[2] and int(match[1]) > int(match[2])):
        return None
    if match[1]:
        start, end = int(match[1]), min(int(match[2] or size), size - 1)
    else:
        start, end = max(0, size - int(match[2])), size - 1
    if start > end:
        raise S3Error("InvalidRange", f"{header}: the object has {size} bytes.", {"Content-Range": f"bytes */{size}"})
    return start, end - start + 1


def _seconds(header: str) -> float | None:
    try:
        return parsedate_to_datetime(header).timestamp()
    except (ValueError, OverflowError):
        return None


def _etags(header: str) -> tuple[str, ...]:
    return tuple(part.strip().strip('"') for part in header.split(",") if part.strip())


def _matches(etags: tuple[str, ...], etag: str) -> bool:
    return "*" in etags or etag in etags


def _stamp(found: "StoredObject") -> int:
    """Whole seconds, as in the ``Last-Modified`` header."""
    return int(found.last_modified)

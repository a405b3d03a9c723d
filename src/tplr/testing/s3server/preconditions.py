"""Conditions of requests and Range: pure functions of a header and the object as it is now."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Protocol

from tplr.testing.s3server.errors import S3Error


class Version(Protocol):
    """What conditions are about; ``last_modified`` in unix seconds."""

    @property
    def etag(self) -> str: ...

    @property
    def last_modified(self) -> float: ...


@dataclass(frozen=True)
class Conditions:
    """ETags without quotes, or ``*``, empty if the header was not sent; times in unix seconds.

    As HTTP has it, a time counts only without the ETags that say the same more exactly, and if it can be read.
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

    def check_read(self, found: Version) -> None:
        """Of an object that exists: raises PreconditionFailed (412), or NotModified (304)."""
        self._check_wanted(found)
        if self._excludes(found):
            raise S3Error("NotModified", "The object is the one that is known already.", {"ETag": f'"{found.etag}"'})

    def check_write(self, found: Version | None) -> None:
        """Of the object that a write would replace, None if there is none: raises PreconditionFailed."""
        self._check_wanted(found)
        if found is not None and self._excludes(found):
            raise S3Error("PreconditionFailed", "The object exists, and the request excludes it.")

    def _check_wanted(self, found: Version | None) -> None:
        if self.if_match:
            wanted = found is not None and _matches(self.if_match, found.etag)
        else:
            wanted = found is None or self.unmodified_since is None or _stamp(found) <= self.unmodified_since
        if not wanted:
            raise S3Error("PreconditionFailed", "The object is not the one that the request is about.")

    def _excludes(self, found: Version) -> bool:
        if self.if_none_match:
            return _matches(self.if_none_match, found.etag)
        return self.modified_since is not None and _stamp(found) <= self.modified_since


def read_range(header: str | None, size: int) -> tuple[int, int] | None:
    """``(start, length)`` of one ``bytes=`` range of an object of ``size`` bytes, or None for all of it.

    As HTTP has it, a header that is no single byte range is ignored.

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


def _stamp(found: Version) -> int:
    """As the ``Last-Modified`` header says it."""
    return int(found.last_modified)

"""If-Match, If-None-Match and Range: pure functions of a header and the object as it is now."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tplr.localnet.s3server.errors import S3Error


@dataclass(frozen=True)
class Conditions:
    """ETags without quotes, or ``*``; empty means that the header was not sent."""

    if_match: tuple[str, ...] = ()
    if_none_match: tuple[str, ...] = ()

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "Conditions":
        return cls(_etags(headers.get("If-Match", "")), _etags(headers.get("If-None-Match", "")))

    def check_read(self, etag: str) -> None:
        """Of an object that exists: raises PreconditionFailed (412), or NotModified (304)."""
        self._check_match(etag)
        if _matches(self.if_none_match, etag):
            raise S3Error("NotModified", "The object has an ETag that If-None-Match names.", {"ETag": f'"{etag}"'})

    def check_write(self, etag: str | None) -> None:
        """Of the object that a write would replace, None if there is none: raises PreconditionFailed."""
        self._check_match(etag)
        if _matches(self.if_none_match, etag):
            raise S3Error("PreconditionFailed", "The object exists, and If-None-Match excludes it.")

    def _check_match(self, etag: str | None) -> None:
        if self.if_match and not _matches(self.if_match, etag):
            raise S3Error("PreconditionFailed", "The object is not the one that If-Match names.")


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


def _etags(header: str) -> tuple[str, ...]:
    return tuple(part.strip().strip('"') for part in header.split(",") if part.strip())


def _matches(etags: tuple[str, ...], etag: str | None) -> bool:
    return etag is not None and ("*" in etags or etag in etags)

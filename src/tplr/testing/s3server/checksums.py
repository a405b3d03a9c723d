"""Checksums that a client sends with a body in ``x-amz-checksum-*`` headers, and composite checksums of multipart."""

import base64
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tplr.testing.s3server.errors import S3Error


class Hash(Protocol):
    """The part of :mod:`hashlib`'s interface that is used here."""

    @property
    def digest_size(self) -> int: ...

    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


class Crc32:
    """CRC32 with the interface of :mod:`hashlib`."""

    digest_size = 4

    def __init__(self, data: bytes = b"") -> None:
        self._value = zlib.crc32(data)

    def update(self, data: bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


# R2 also supports CRC32C and CRC64NVME. Python has neither, so they are refused.
ALGORITHMS: Mapping[str, Callable[[bytes], Hash]] = {"crc32": Crc32, "sha1": hashlib.sha1, "sha256": hashlib.sha256}
PREFIX = "x-amz-checksum-"
CHECKSUM_HEADERS = frozenset({"x-amz-sdk-checksum-algorithm", *(PREFIX + name for name in ALGORITHMS)})


def sent_checksums(headers: Mapping[str, str]) -> dict[str, str]:
    """The ``x-amz-checksum-*`` headers of a request, as they are stored and returned: lower-case name → base64.

    Raises:
        S3Error: InvalidArgument, x-amz-sdk-checksum-algorithm names a checksum that was not sent.
    """
    sent = {PREFIX + name: headers[PREFIX + name] for name in ALGORITHMS if PREFIX + name in headers}
    named = headers.get("x-amz-sdk-checksum-algorithm", "").lower()
    if named and PREFIX + named not in sent:
        raise S3Error("InvalidArgument", f"x-amz-sdk-checksum-algorithm is {named[:20]!r}; its checksum is not sent.")
    return sent


def multipart_algorithm(headers: Mapping[str, str]) -> str:
    """The ``x-amz-checksum-algorithm`` of a new multipart upload, lower-case; empty if it has none."""
    name = headers.get("x-amz-checksum-algorithm", "").lower()
    if name and name not in ALGORITHMS:
        raise S3Error("NotImplemented", f"Checksum {name[:20]!r}: expected one of {', '.join(ALGORITHMS)}.")
    return name


def composite_checksum(algorithm: str, parts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The checksum of the parts' checksums (as bytes), a dash and the number of parts. Empty without an algorithm.

    Raises:
        S3Error: InvalidPart, a part was sent without this checksum.
    """
    if not algorithm:
        return {}
    header = PREFIX + algorithm
    if not all(header in part for part in parts):
        raise S3Error("InvalidPart", f"The upload was created for {header}; a part was sent without it.")
    digest = ALGORITHMS[algorithm](b"".join(base64.b64decode(part[header]) for part in parts)).digest()
    return {header: f"{base64.b64encode(digest).decode()}-{len(parts)}"}


def checksum_tag(header: str) -> str:
    """``x-amz-checksum-crc32`` → ``ChecksumCRC32``, its element in an XML document."""
    return "Checksum" + header.removeprefix(PREFIX).upper()


def tagged_checksums(texts: Mapping[str, str]) -> dict[str, str]:
    """Header name → value of every checksum element among ``texts``, the elements of an XML document."""
    return {PREFIX + tag[8:].lower(): text for tag, text in texts.items() if tag.startswith("Checksum")}

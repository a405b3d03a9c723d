"""The protocol of object stores: one bucket with one credential."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tplr.errors import ObjectTooLarge, PreconditionFailed, StoreError
from tplr.schemas import ObjectInfo
from tplr.storage.local_files import download_to

if TYPE_CHECKING:
    from tplr.storage.s3_multipart import S3Multipart

# R2's limit of a single PUT (5 GiB less 5 MiB), a little stricter than S3's.
MAX_PUT_BYTES = 5 * 2**30 - 5 * 2**20
# S3's limit for user metadata; R2 allows four times as much.
MAX_METADATA_BYTES = 2048
CHUNK_BYTES = 2**20

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_METADATA_NAME = re.compile(r"[a-z0-9-]+")
_METADATA_VALUE = re.compile(r"([!-~]([ -~]*[!-~])?)?")


# Called with each piece of a body. The next piece may reuse the same memory.
Sink = Callable[[memoryview], object]


@dataclass(frozen=True)
class UnfinishedUpload:
    """A multipart upload that was neither completed nor aborted. Its parts are stored, and billed.

    ``begun`` is in unix seconds, by the store's clock.
    """

    key: str
    upload_id: str
    begun: float


@dataclass(frozen=True)
class StoredParts:
    """What an unfinished upload has stored: bytes, and the time of its last part, or of its start without a part.

    ``last_written`` is in unix seconds, by the store's clock.
    """

    size: int
    last_written: float


class ObjectStore(Protocol):
    """One bucket with one credential.

    Methods raise only ``StoreError`` and its subclasses: ``ObjectNotFound``, ``AccessDenied``, ``PreconditionFailed``,
    ``ObjectTooLarge`` and ``StoreUnavailable``, the only one that is worth a retry. Plain ``StoreError`` means that the
    request itself is wrong. Callers retry, with ``retry.with_retry``. (The store itself only repeats a read or a delete
    if its kept-alive connection broke before the response.)

    ``last_modified`` is by the store's clock, truncated to whole seconds as in S3's header.

    Attributes:
        name: name of the bucket, for errors and logs.
        multipart: multipart uploads; None if a PUT takes objects of any size.
    """

    name: str
    multipart: "S3Multipart | None" = None

    async def head(self, key: str) -> ObjectInfo:
        """Return size, ETag, time and metadata of an object, without its bytes."""
        ...

    async def get(
        self,
        key: str,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
        verify: bool = True,
    ) -> bytes:
        """Return the object, or exactly its bytes ``[start, stop)``.

        Args:
            verify: check a whole object whose ETag is an MD5; for callers that do not check their own digest.

        Raises:
            StoreUnavailable: also if the bytes do not match the ETag.
            ObjectTooLarge: the response announces more than ``max_bytes``. Its body is not read.
            PreconditionFailed: the ETag is not ``if_match``, or the object ends before ``stop``.
        """
        ...

    async def receive(
        self,
        key: str,
        sink: Sink,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
    ) -> ObjectInfo:
        """Get like ``get``, but pass each piece to ``sink`` in a thread as it arrives.

        ``sink`` must not raise errors that the network could raise, such as OSError.

        Returns:
            The whole object's description, after all bytes have arrived.
        """
        ...

    async def get_piece(
        self, key: str, start: int, max_bytes: int, *, if_match: str | None = None
    ) -> tuple[ObjectInfo, bytes]:
        """Return an object's description, and up to ``max_bytes`` of it from ``start`` on.

        A negative ``start`` counts from the end.

        Raises:
            ObjectTooLarge: ``max_bytes`` is less than the number of last bytes.
            PreconditionFailed: the ETag is not ``if_match``, or the object has no byte at ``start``.
        """
        ...

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        metadata: Mapping[str, str] | None = None,
        create_only: bool = False,
        content_type: str = "",
    ) -> ObjectInfo:
        """Store ``data``. Readers see the old object or the new one, never a part.

        Args:
            metadata: names of a-z, 0-9 and ``-``; values of printable ASCII; 2 KiB in all.
            create_only: fail rather than overwrite. A retry after a lost response may find its own first write: on
                PreconditionFailed, compare the ETag (the MD5 of the data).
            content_type: media type for browsers; a folder does not store it.

        Returns:
            The stored object. ``last_modified`` is the time of the response: the object's, or slightly later.
        """
        ...

    async def get_file(self, key: str, path: Path, *, max_bytes: int, if_match: str | None = None) -> ObjectInfo:
        """Get like ``get``, streamed into ``path``, which is created whole or not at all."""
        async with download_to(path, self.name, key) as file:
            return await self.receive(key, file.write, max_bytes=max_bytes, if_match=if_match)

    async def put_file(
        self, key: str, path: Path, *, metadata: Mapping[str, str] | None = None, create_only: bool = False
    ) -> ObjectInfo:
        """Put like ``put``, streamed from ``path``; at most ``MAX_PUT_BYTES`` if the store has ``multipart``.

        The file is hashed while it is sent. A damaged object raises StoreUnavailable, but is readable until it is put
        again. With ``create_only`` the store refuses a damaged object.
        """
        ...

    async def delete(self, key: str) -> None:
        """Delete an object; a missing object is no error."""
        ...

    async def list(self, prefix: str = "", *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        """List objects with ``prefix`` and a key above ``start_after``, ascending, without their metadata."""
        ...


def check_key(key: str) -> None:
    """Refuse keys that a store, a client or a file system may normalise to another key.

    Raises:
        StoreError: not 1 to 1024 bytes of UTF-8 without control characters, or with empty, ``.`` or ``..`` parts.
    """
    try:
        length = len(key.encode())
    except UnicodeEncodeError:
        length = 0
    parts_fit = not any(part in ("", ".", "..") for part in key.split("/"))
    if not (1 <= length <= 1024 and parts_fit) or _CONTROL.search(key):
        raise StoreError(
            f"object key {key[:80]!r}: expected 1 to 1024 bytes of UTF-8 without control characters "
            "and without empty, '.' or '..' parts"
        )


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of the metadata. Raises StoreError if a header can't carry it."""
    checked = dict(metadata or {})
    for name, value in checked.items():
        if not _METADATA_NAME.fullmatch(name) or not _METADATA_VALUE.fullmatch(value):
            raise StoreError(
                f"metadata {name!r}: expected a name of a-z, 0-9, '-' and a value of printable ASCII, "
                f"got a value of {len(value)} characters"
            )
    size = sum(len(name) + len(value) for name, value in checked.items())
    if size > MAX_METADATA_BYTES:
        raise StoreError(f"metadata: expected at most {MAX_METADATA_BYTES} bytes, got {size}")
    return checked


def check_announced(size: int, max_bytes: int, *, bucket: str, key: str) -> None:
    """Raise ObjectTooLarge if the announced size is above ``max_bytes``."""
    if size > max_bytes:
        raise ObjectTooLarge(f"{size} bytes; at most {max_bytes} allowed", bucket=bucket, key=key)


def check_range(byte_range: tuple[int, int] | None, max_bytes: int, *, bucket: str, key: str) -> None:
    """Raise StoreError for a range without bytes, ObjectTooLarge for one above ``max_bytes``."""
    if byte_range is not None:
        start, stop = byte_range
        if not 0 <= start < stop:
            raise StoreError(f"byte range [{start}, {stop}): expected 0 <= start < stop", bucket=bucket, key=key)
        check_announced(stop - start, max_bytes, bucket=bucket, key=key)


def select_range(
    info: ObjectInfo, max_bytes: int, if_match: str | None, byte_range: tuple[int, int] | None, *, bucket: str
) -> tuple[int, int]:
    """Return the range ``[start, stop)`` that a get of this object reads. Raises as ``ObjectStore.get``."""
    check_match(info, if_match, bucket=bucket)
    check_range(byte_range, max_bytes, bucket=bucket, key=info.key)
    start, stop = byte_range or (0, info.size)
    if stop > info.size:
        raise range_missing(byte_range, info.size, bucket=bucket, key=info.key)
    check_announced(stop - start, max_bytes, bucket=bucket, key=info.key)
    return start, stop


def select_piece(info: ObjectInfo, start: int, max_bytes: int, if_match: str | None, *, bucket: str) -> tuple[int, int]:
    """Return the range ``[start, stop)`` that ``get_piece`` of this object reads. Raises as ``get_piece``."""
    start, stop = (max(0, info.size + start), info.size) if start < 0 else (start, min(start + max_bytes, info.size))
    if start >= info.size:
        raise range_missing((start, start + max_bytes), info.size, bucket=bucket, key=info.key)
    return select_range(info, max_bytes, if_match, (start, stop), bucket=bucket)


def check_match(info: ObjectInfo, if_match: str | None, *, bucket: str) -> None:
    """Raise PreconditionFailed if the object's ETag is not ``if_match``."""
    if if_match is not None and info.etag != if_match:
        raise PreconditionFailed(f"ETag is {info.etag!r}, expected {if_match!r}", bucket=bucket, key=info.key)


def range_missing(byte_range: tuple[int, int] | None, size: int, *, bucket: str, key: str) -> PreconditionFailed:
    """Return the error for an object that ends before the range."""
    return PreconditionFailed(f"the object has {size} bytes, expected the range {byte_range}", bucket=bucket, key=key)


def already_there(bucket: str, key: str) -> PreconditionFailed:
    """Return the error for a create-only put onto an existing object."""
    return PreconditionFailed("the object exists and must not be overwritten", bucket=bucket, key=key)


def whole_seconds(timestamp: float) -> float:
    """Return unix seconds truncated as in S3's ``Last-Modified`` header."""
    return float(math.floor(timestamp))

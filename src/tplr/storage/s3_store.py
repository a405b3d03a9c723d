"""One S3 bucket with one credential: guarded requests over a client that somebody else owns."""

import asyncio
import base64
import contextlib
import hashlib
import io
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO

from tplr.errors import StoreUnavailable
from tplr.schemas import Bucket, ObjectInfo
from tplr.storage.base import (
    CHUNK_BYTES,
    check_announced,
    check_key,
    check_match,
    check_metadata,
    check_put_size,
    check_range,
    range_missing,
    whole_seconds,
)
from tplr.storage.local_files import batches, disk_errors, download_to
from tplr.storage.s3_border import s3_border
from tplr.storage.s3_multipart import S3Multipart

# It goes back into a request header, so it may hold nothing that a header can't.
_ETAG = re.compile(r"[!#-~]{1,128}")
_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a call may take when its caller does not say.

    Attributes:
        call_seconds: to be answered; all of a call that carries no body.
        grace_seconds: after which a download has to keep up with ``download_floor``.
        download_floor: bytes per second, over the whole body so far; a slow drip ends.
        upload_floor: bytes per second; an upload has ``call_seconds`` and ``size / upload_floor`` on top.
    """

    call_seconds: float = 30.0
    grace_seconds: float = 2.0
    download_floor: float = 2**20
    upload_floor: float = 2**17


class S3Store:
    """An ``ObjectStore`` over S3; made by ``S3Connections.store``.

    ``timeout`` (seconds, absolute for the whole call) replaces the ``Limits``, but for a download's floor.
    """

    def __init__(self, bucket: Bucket, client: Callable[[], AbstractAsyncContextManager[Any]], limits: Limits) -> None:
        self._bucket = bucket
        self._client = client
        self._limits = limits

    def __repr__(self) -> str:
        return f"S3Store({self._bucket!r})"

    @property
    def name(self) -> str:
        return self._bucket.name

    @property
    def multipart(self) -> S3Multipart:
        return S3Multipart(self.name, self._call, self._seconds)

    async def head(self, key: str, *, timeout: float | None = None) -> ObjectInfo:
        check_key(key)
        answer = await self._call("head_object", key, self._seconds(timeout), Key=key)
        return self._info(key, answer)

    async def get(
        self,
        key: str,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> bytes:
        async with self._download(key, max_bytes, if_match, byte_range, timeout) as (info, chunks):
            # BytesIO fills the bytes it was made from, and hands them out uncopied: a body is in memory once, and what
            # was announced but does not come takes none (the zeros of a large ``bytes`` are not there until written).
            buffer = io.BytesIO(bytes(info.size))
            async for chunk in chunks:
                buffer.write(chunk)
        return buffer.getvalue()

    @contextlib.asynccontextmanager
    async def stream(
        self,
        key: str,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._download(key, max_bytes, if_match, byte_range, timeout) as (_, chunks):
            yield chunks

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        metadata: Mapping[str, str] | None = None,
        create_only: bool = False,
        timeout: float | None = None,
    ) -> ObjectInfo:
        # A file object, as aiohttp would send plain bytes in one blocking piece.
        return await self._upload(
            key, io.BytesIO(data), len(data), metadata=metadata, create_only=create_only, timeout=timeout
        )

    async def get_file(
        self,
        key: str,
        path: Path,
        *,
        max_bytes: int,
        if_match: str | None = None,
        timeout: float | None = None,
    ) -> ObjectInfo:
        async with (
            download_to(path, self.name, key) as file,
            self._download(key, max_bytes, if_match, None, timeout) as (info, chunks),
        ):
            async for batch in batches(chunks):
                await asyncio.to_thread(file.writelines, batch)
        return info

    async def put_file(
        self,
        key: str,
        path: Path,
        *,
        metadata: Mapping[str, str] | None = None,
        create_only: bool = False,
        timeout: float | None = None,
    ) -> ObjectInfo:
        with disk_errors(self.name, key):
            file = await asyncio.to_thread(path.open, "rb")
        with file:
            size = os.fstat(file.fileno()).st_size
            return await self._upload(key, file, size, metadata=metadata, create_only=create_only, timeout=timeout)

    async def delete(self, key: str, *, timeout: float | None = None) -> None:
        check_key(key)
        await self._call("delete_object", key, self._seconds(timeout), Key=key)

    def _page(self, entries: list[dict[str, Any]], prefix: str, after: str) -> list[ObjectInfo]:
        """The entries of one page; a server that does not ascend could go on for ever."""
        found: list[ObjectInfo] = []
        for entry in entries:
            key = entry.get("Key", "")
            if not key.startswith(prefix) or key <= after:
                raise StoreUnavailable("a listing out of order", bucket=self.name, key=prefix)
            found.append(self._info(key, {**entry, "ContentLength": entry.get("Size")}))
            after = key
        return found

    def _seconds(self, timeout: float | None, upload_size: int = 0) -> float:
        default = self._limits.call_seconds + upload_size / self._limits.upload_floor
        return default if timeout is None else timeout

    async def _call(self, operation: str, key: str, seconds: float, **parameters: object) -> dict[str, Any]:
        async with s3_border(self.name, key, seconds), self._client() as client:
            return await getattr(client, operation)(Bucket=self.name, **parameters)

    async def _upload(
        self,
        key: str,
        body: BinaryIO,
        size: int,
        *,
        metadata: Mapping[str, str] | None,
        create_only: bool,
        timeout: float | None,
    ) -> ObjectInfo:
        check_key(key)
        checked = check_metadata(metadata)
        check_put_size(size, bucket=self.name, key=key)
        with disk_errors(self.name, key):
            md5 = await asyncio.to_thread(_md5, body)
        condition = {"IfNoneMatch": "*"} if create_only else {}
        answer = await self._call(
            "put_object",
            key,
            self._seconds(timeout, size),
            Key=key,
            Body=body,
            ContentLength=size,
            ContentMD5=base64.b64encode(md5).decode(),
            Metadata=checked,
            **condition,
        )
        # Not every server looks at Content-MD5.
        if str(answer.get("ETag", "")).strip('"') != md5.hex():
            raise StoreUnavailable("the body arrived damaged", bucket=self.name, key=key)
        # S3 tells a put's LastModified to nobody; its Date is the same clock, a moment later.
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        modified = None
        with contextlib.suppress(ValueError):
            modified = parsedate_to_datetime(date)
        return self._info(key, {**answer, "ContentLength": size, "LastModified": modified, "Metadata": checked})

    @contextlib.asynccontextmanager
    async def _download(
        self,
        key: str,
        max_bytes: int,
        if_match: str | None,
        byte_range: tuple[int, int] | None,
        timeout: float | None,
    ) -> AsyncIterator[tuple[ObjectInfo, AsyncIterator[bytes]]]:
        """What the store announced, checked, and its body in pieces of at most ``CHUNK_BYTES``."""
        check_key(key)
        check_range(byte_range, max_bytes, bucket=self.name, key=key)
        parameters = {"Key": key}
        if if_match is not None:
            parameters["IfMatch"] = f'"{if_match}"'
        if byte_range is not None:
            parameters["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
        loop = asyncio.get_running_loop()
        hard_stop = loop.time() + timeout if timeout is not None else float("inf")
        async with s3_border(self.name, key, self._seconds(timeout)) as scope, self._client() as client:
            answer = await client.get_object(Bucket=self.name, **parameters)
            info = self._info(key, answer)
            check_announced(info.size, max_bytes, bucket=self.name, key=key)
            check_match(info, if_match, bucket=self.name)
            if byte_range is not None:
                self._check_content_range(answer, info, byte_range)
            yield info, self._chunks(answer["Body"], info, scope, hard_stop)

    async def _chunks(
        self, body: Any, info: ObjectInfo, scope: asyncio.Timeout, hard_stop: float
    ) -> AsyncIterator[bytes]:
        """The announced bytes, no more and no fewer, each piece before the floor's deadline for it."""
        floor_starts = asyncio.get_running_loop().time() + self._limits.grace_seconds
        received = 0
        while received < info.size:
            scope.reschedule(min(hard_stop, floor_starts + received / self._limits.download_floor))
            chunk = await body.read(min(CHUNK_BYTES, info.size - received))
            if not chunk:
                raise StoreUnavailable(
                    f"the body ended after {received} of {info.size} bytes", bucket=self.name, key=info.key
                )
            received += len(chunk)
            yield chunk

    def _check_content_range(self, answer: Mapping[str, Any], info: ObjectInfo, wanted: tuple[int, int]) -> None:
        """Raise unless the answer is exactly the range that was asked for."""
        start, stop = wanted
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        found = re.fullmatch(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", answer.get("ContentRange") or "")
        if status != 206 or not found or int(found[1]) != start or info.size != int(found[2]) + 1 - start:
            raise StoreUnavailable("the store ignored the byte range", bucket=self.name, key=info.key)
        if int(found[2]) + 1 != stop:
            raise range_missing(wanted, int(found[3]), bucket=self.name, key=info.key)

    def _info(self, key: str, answer: Mapping[str, Any]) -> ObjectInfo:
        """What an answer's headers, or an entry of a listing, say of an object."""
        size, modified = answer.get("ContentLength"), answer.get("LastModified")
        etag = str(answer.get("ETag", "")).strip('"')
        if not isinstance(size, int) or size < 0 or not isinstance(modified, datetime) or not _ETAG.fullmatch(etag):
            raise StoreUnavailable("an answer without a usable size, ETag or time", bucket=self.name, key=key)
        return ObjectInfo(
            key=key,
            size=size,
            etag=etag,
            last_modified=whole_seconds(modified.timestamp()),
            metadata=dict(answer.get("Metadata", {})),
        )

    async def list(
        self, prefix: str = "", *, start_after: str = "", limit: int | None = None, timeout: float | None = None
    ) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        async with s3_border(self.name, prefix, self._seconds(timeout)), self._client() as client:
            while limit is None or len(found) < limit:
                page = _PAGE if limit is None else min(_PAGE, limit - len(found))
                after = found[-1].key if found else start_after
                answer = await client.list_objects_v2(Bucket=self.name, Prefix=prefix, StartAfter=after, MaxKeys=page)
                entries = answer.get("Contents", [])
                found += self._page(entries, prefix, after)
                if not answer.get("IsTruncated") or not entries:
                    break
        return found[:limit]


def _md5(file: BinaryIO) -> bytes:
    """MD5 of the file, which is then at its start again."""
    digest = hashlib.md5(usedforsecurity=False)
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    file.seek(0)
    return digest.digest()

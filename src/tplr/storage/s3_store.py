"""One S3 bucket with one credential: guarded requests over a client that somebody else owns."""

import asyncio
import base64
import contextlib
import io
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from tplr.errors import StoreUnavailable
from tplr.logging import TRACE, logger
from tplr.schemas import Bucket, ObjectInfo
from tplr.storage.base import (
    Sink,
    check_announced,
    check_key,
    check_match,
    check_metadata,
    check_put_size,
    check_range,
    range_missing,
    whole_seconds,
)
from tplr.storage.local_files import disk_errors, download_to
from tplr.storage.progress import log_progress
from tplr.storage.s3_body import Body, BytesBody, FileBody
from tplr.storage.s3_border import translate_errors
from tplr.storage.s3_exchange import Answer
from tplr.storage.s3_multipart import S3Multipart
from tplr.storage.s3_wire import Wire, facts_of, refusal_of

# It goes back into a request header, so it may hold nothing that a header can't.
_ETAG = re.compile(r"[!#-~]{1,128}")
_PAGE = 1000
_MADE_ROOM_FOR = range(2**20 + 1, 2**28)  # bytes: more than a document has, no more than an update


@dataclass(frozen=True, kw_only=True)
class TransferLimits:
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

    ``timeout`` (seconds, absolute for the whole call) replaces the ``TransferLimits``, but for a download's floor.
    """

    def __init__(
        self,
        bucket: Bucket,
        client: Callable[[], AbstractAsyncContextManager[Any]],
        wire: Callable[[], Wire],
        limits: TransferLimits,
    ) -> None:
        self._bucket = bucket
        self._client = client
        self._wire = wire
        self._limits = limits

    def __repr__(self) -> str:
        return f"S3Store({self._bucket!r})"

    @property
    def name(self) -> str:
        return self._bucket.name

    @property
    def multipart(self) -> S3Multipart:
        return S3Multipart(self.name, self._call, self._ask, self._seconds)

    async def head(self, key: str, *, timeout: float | None = None) -> ObjectInfo:
        check_key(key)
        return self._info(key, await self._ask("HEAD", key, {}, timeout=timeout))

    async def get(
        self,
        key: str,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> bytes:
        def begin(info: ObjectInfo) -> memoryview:
            nonlocal buffer
            if info.size != expected:
                buffer = io.BytesIO(bytes(info.size))
            return buffer.getbuffer()

        # BytesIO lends the bytes it was made from, and hands them out uncopied: a body is in memory once, and what was
        # announced but does not come takes none (the zeros of a large ``bytes`` are not there until written). An update
        # is as large as it may be, and is made room for here: the allocator keeps some of what it frees for each
        # thread that had it.
        expected = max_bytes if max_bytes in _MADE_ROOM_FOR else 0
        buffer = io.BytesIO(bytes(expected))
        await self._receive(key, begin, max_bytes=max_bytes, if_match=if_match, byte_range=byte_range, timeout=timeout)
        return buffer.getvalue()

    async def receive(
        self,
        key: str,
        sink: Sink,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> ObjectInfo:
        return await self._receive(
            key, lambda info: sink, max_bytes=max_bytes, if_match=if_match, byte_range=byte_range, timeout=timeout
        )

    async def get_piece(
        self, key: str, start: int, max_bytes: int, *, if_match: str | None = None, timeout: float | None = None
    ) -> tuple[ObjectInfo, bytes]:
        buffer = io.BytesIO()
        info = await self._receive(
            key,
            lambda info: buffer.write,
            max_bytes=max_bytes,
            if_match=if_match,
            byte_range=(start, start + max_bytes),
            exact=False,
            timeout=timeout,
        )
        return info, buffer.getvalue()

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        metadata: Mapping[str, str] | None = None,
        create_only: bool = False,
        timeout: float | None = None,
    ) -> ObjectInfo:
        body = BytesBody(data)
        # Others look for it already: the store itself must refuse it if it is damaged.
        md5 = await asyncio.to_thread(body.md5)
        return await self._upload(key, body, md5, metadata=metadata, create_only=create_only, timeout=timeout)

    async def put_claiming(self, key: str, data: bytes, *, md5: str | None = None, sha256: str | None = None) -> None:
        """Put bytes by digests that may be wrong ones, in hex: so one learns whether the store looks at them.

        Raises:
            UploadDamaged: it does.
        """
        check_key(key)
        await self._ask("PUT", key, _content_md5(md5), body=BytesBody(data), sha256=sha256)

    async def get_file(
        self,
        key: str,
        path: Path,
        *,
        max_bytes: int,
        if_match: str | None = None,
        timeout: float | None = None,
    ) -> ObjectInfo:
        async with download_to(path, self.name, key) as file:
            return await self._receive(
                key, lambda info: file.write, max_bytes=max_bytes, if_match=if_match, timeout=timeout
            )

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
            body = await asyncio.to_thread(FileBody, path)
        with body:
            # What is damaged is put once more, but not where it may not be overwritten.
            md5 = await asyncio.to_thread(body.read_md5) if create_only else None
            return await self._upload(key, body, md5, metadata=metadata, create_only=create_only, timeout=timeout)

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
        async with translate_errors(self.name, key, seconds), self._client() as client:
            return await getattr(client, operation)(Bucket=self.name, **parameters)

    async def _upload(
        self,
        key: str,
        body: Body,
        md5: str | None,
        *,
        metadata: Mapping[str, str] | None,
        create_only: bool,
        timeout: float | None,
    ) -> ObjectInfo:
        check_key(key)
        checked = check_metadata(metadata)
        check_put_size(body.size, bucket=self.name, key=key)
        headers = _content_md5(md5) | {f"x-amz-meta-{name}": value for name, value in checked.items()}
        if create_only:
            headers["If-None-Match"] = "*"
        answer = await self._ask("PUT", key, headers, body=body, timeout=timeout)
        # Not every server looks at Content-MD5.
        if answer["ETag"].strip('"') != body.md5():
            raise StoreUnavailable("the body arrived damaged", bucket=self.name, key=key)
        # S3 tells a put's LastModified to nobody; its Date is the same clock, a moment later.
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        modified = None
        with contextlib.suppress(ValueError, OverflowError):
            modified = parsedate_to_datetime(date)
        return self._info(key, {**answer, "ContentLength": body.size, "LastModified": modified, "Metadata": checked})

    async def _receive(
        self,
        key: str,
        begin: Callable[[ObjectInfo], Sink | memoryview],
        *,
        max_bytes: int,
        if_match: str | None,
        byte_range: tuple[int, int] | None = None,
        exact: bool = True,
        timeout: float | None,
    ) -> ObjectInfo:
        """Have what the store announces checked, and then every byte of it given to, or put into, what ``begin``
        returns.

        Args:
            exact: the whole range must be there; otherwise it may begin at a negative number, before the end.
        """
        check_key(key)
        if exact:
            check_range(byte_range, max_bytes, bucket=self.name, key=key)
        headers = {} if if_match is None else {"If-Match": f'"{if_match}"'}
        if byte_range is not None:
            start, stop = byte_range
            headers["Range"] = f"bytes={start}" if start < 0 else f"bytes={start}-{stop - 1}"
        found: list[ObjectInfo] = []

        def choose(facts: Mapping[str, Any]) -> tuple[int, Sink | memoryview]:
            info = self._info(key, facts)
            check_announced(info.size, max_bytes, bucket=self.name, key=key)
            check_match(info, if_match, bucket=self.name)
            size = info.size if byte_range is None else self._whole_size(facts, info, byte_range, exact=exact)
            found.append(replace(info, size=size))
            return info.size, begin(info)

        await self._ask("GET", key, headers, choose=choose, timeout=timeout)
        return found[0]

    async def _ask(
        self,
        method: str,
        key: str,
        headers: Mapping[str, str],
        *,
        query: Mapping[str, str] | None = None,
        body: Body | None = None,
        sha256: str | None = None,
        choose: Callable[[Mapping[str, Any]], tuple[int, Sink | memoryview]] = lambda facts: (0, len),
        timeout: float | None = None,
    ) -> Mapping[str, Any]:
        """Send a request; returns what the answer's headers say.

        Args:
            sha256: of the body, for the store to check; without it nothing is said of the body.
            choose: is told that first, and chooses how much of the answer's body goes where. From then on that must
                keep up with the floor; before, it is the call's time that runs.
        """
        said: dict[str, Any] = {}

        def judge(answer: Answer) -> tuple[int, Sink | memoryview]:
            logger.log(TRACE, "%s %s/%s: %d", method, self.name, key, answer.status)
            if answer.status not in (200, 206):
                raise refusal_of(answer, self.name, key)
            said.update(facts_of(answer))
            return choose(said)

        def due() -> float:
            if exchange.began is None:
                tell(exchange.sent, size)
                return asked + self._seconds(timeout, size)
            tell(exchange.received, said["ContentLength"] or 0)
            by_floor = exchange.began + self._limits.grace_seconds + exchange.received / self._limits.download_floor
            return by_floor if timeout is None else min(by_floor, asked + timeout)

        def tell(done: int, total: int) -> None:
            if total and not query and "Range" not in headers:  # who moves parts tells of the whole
                progress(done, total)

        size = body.size if body else 0
        wire, progress = self._wire(), log_progress(f"{method} {self.name}/{key}")
        exchange = wire.request(method, key, headers, judge, query=query, body=body, sha256=sha256)
        asked = time.monotonic()
        async with translate_errors(self.name, key, None):
            await exchange.run(wire.threads, due)
        return said

    def _whole_size(self, answer: Mapping[str, Any], info: ObjectInfo, wanted: tuple[int, int], *, exact: bool) -> int:
        """The object's size, if the answer is just the range that was asked for, or all there is of it."""
        start, stop = wanted
        if not info.size:  # so some servers say that an object is empty
            raise range_missing(wanted, 0, bucket=self.name, key=info.key)
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        found = re.fullmatch(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", answer.get("ContentRange") or "")
        first, last, size = map(int, found.groups()) if found else (0, 0, 0)
        if start < 0:
            start, stop = max(0, size + start), size
        if status != 206 or not found or first != start or info.size != last + 1 - start:
            raise StoreUnavailable("the store ignored the byte range", bucket=self.name, key=info.key)
        if last + 1 != (stop if exact else min(stop, size)):
            raise range_missing(wanted, size, bucket=self.name, key=info.key)
        return size

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
        async with translate_errors(self.name, prefix, self._seconds(timeout)), self._client() as client:
            while limit is None or len(found) < limit:
                page = _PAGE if limit is None else min(_PAGE, limit - len(found))
                after = found[-1].key if found else start_after
                answer = await client.list_objects_v2(Bucket=self.name, Prefix=prefix, StartAfter=after, MaxKeys=page)
                entries = answer.get("Contents", [])
                found += self._page(entries, prefix, after)
                if not answer.get("IsTruncated") or not entries:
                    break
        return found[:limit]


def _content_md5(md5: str | None) -> dict[str, str]:
    return {} if md5 is None else {"Content-MD5": base64.b64encode(bytes.fromhex(md5)).decode()}

"""Operations on objects: put, get, head, delete; and the bucket's own HEAD."""

import asyncio
from collections.abc import Mapping
from email.utils import formatdate
from typing import BinaryIO

from tplr.testing.s3server.blobfile import FileSlice
from tplr.testing.s3server.body import receive, receive_document
from tplr.testing.s3server.checksums import sent_checksums
from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.objects import StoredObject
from tplr.testing.s3server.preconditions import Conditions, read_range
from tplr.testing.s3server.request import Reply, S3Request
from tplr.testing.s3server.storage import Storage
from tplr.testing.s3server.xmltext import parse_delete

# The headers of a PUT that a later GET returns, in addition to user metadata.
KEPT_HEADERS = frozenset({
    "cache-control", "content-disposition", "content-encoding", "content-language", "content-type", "expires",
})  # fmt: skip


async def put_object(storage: Storage, request: S3Request) -> Reply:
    storage.rules.check_key(request.key)
    storage.rules.check_body_length(request.content_length)
    headers = kept_headers(request.headers)
    storage.rules.check_metadata(headers)
    conditions = Conditions.of(request.headers)
    current = await asyncio.to_thread(storage.objects.find, request.bucket, request.key)
    # Checked before the body is read and again after it, because another write may have occurred in between.
    conditions.check_write(current)
    storage.admit_write(request)
    async with storage.draft() as draft:
        md5 = await receive(request, draft)
        record = await asyncio.to_thread(
            storage.objects.commit,
            request.bucket, request.key, draft,
            etag=md5, headers=headers, checksums=sent_checksums(request.headers), conditions=conditions,
        )  # fmt: skip
    return Reply(headers={"ETag": f'"{record.etag}"', **record.checksums})


async def get_object(storage: Storage, request: S3Request) -> Reply:
    """GET and HEAD: the sender of the reply leaves out the body of a HEAD."""
    file, record = await asyncio.to_thread(storage.objects.open, request.bucket, request.key)
    try:
        return _reply(file, record, request)
    except S3Error:
        file.close()
        raise


async def delete_object(storage: Storage, request: S3Request) -> Reply:
    await asyncio.to_thread(storage.objects.delete, request.bucket, request.key)
    return Reply(204)


async def delete_objects(storage: Storage, request: S3Request) -> Reply:
    if "Content-MD5" not in request.headers and not sent_checksums(request.headers):
        raise S3Error("InvalidArgument", "DeleteObjects needs Content-MD5 or an x-amz-checksum- header.")
    keys = parse_delete(await receive_document(request))
    for key in keys:
        await asyncio.to_thread(storage.objects.delete, request.bucket, key)
    return Reply.xml("DeleteResult", {"Deleted": [{"Key": key} for key in keys]})


async def head_bucket(storage: Storage, request: S3Request) -> Reply:
    return Reply()


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a PUT that a later GET returns."""
    named = {name.lower(): value for name, value in headers.items()}
    return {name: named[name] for name in sorted(named) if name in KEPT_HEADERS or name.startswith("x-amz-meta-")}


def _reply(file: BinaryIO, record: StoredObject, request: S3Request) -> Reply:
    Conditions.of(request.headers).check_read(record)
    span = read_range(request.headers.get("Range"), record.size)
    headers = {
        "content-type": "application/octet-stream",
        **record.headers,
        "ETag": f'"{record.etag}"',
        # Truncated to seconds: a reader must not see an object as newer than it is.
        "Last-Modified": formatdate(int(record.last_modified), usegmt=True),
        "Accept-Ranges": "bytes",
    }
    if span is None:
        wanted = request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED"
        return Reply(200, {**headers, **(record.checksums if wanted else {})}, FileSlice(file, 0, record.size))
    start, length = span
    headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{record.size}"
    return Reply(206, headers, FileSlice(file, start, length))

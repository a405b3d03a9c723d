"""A request's body on its way in: bounded memory, and every checksum that the client sent is checked."""

import asyncio
import base64
import binascii
import hashlib
import zlib
from collections.abc import AsyncIterator

from aiohttp import ClientPayloadError

from tplr.concurrency.batches import batches
from tplr.testing.s3server.blobfile import Draft
from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.request import Content, S3Request
from tplr.testing.s3server.sigv4 import UNSIGNED

MAX_DOCUMENT = 4 * 2**20  # bytes: a CompleteMultipartUpload of 10,000 parts has about 1 MiB


async def receive(request: S3Request, draft: Draft) -> str:
    """Streams the body into the draft and returns its MD5, 32 hex digits.

    Raises:
        S3Error: IncompleteBody, BadDigest, InvalidDigest, XAmzContentSHA256Mismatch.
    """
    expected_md5 = _content_md5(request)
    expected_sha256 = request.headers["x-amz-content-sha256"]
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()

    def take(batch: list[bytes]) -> None:
        for block in batch:
            md5.update(block)
            if expected_sha256 != UNSIGNED:
                sha256.update(block)
            draft.write(block)

    async for batch in _batches(request.content):
        await asyncio.to_thread(take, batch)
    if draft.size != request.content_length:
        raise S3Error("IncompleteBody", f"{request.content_length} bytes were announced, {draft.size} arrived.")
    if not request.digests_count:
        return md5.hexdigest()
    if expected_md5 is not None and md5.digest() != expected_md5:
        raise S3Error("BadDigest", "The body's MD5 is not that of Content-MD5.")
    if expected_sha256 not in (UNSIGNED, sha256.hexdigest()):
        raise S3Error("XAmzContentSHA256Mismatch", "The body's SHA-256 is not the one that was signed.")
    return md5.hexdigest()


async def receive_document(request: S3Request) -> bytes:
    """A small body, whole. Checksums as in :func:`receive`, and ``x-amz-checksum-crc32``."""
    body = b""
    async for batch in _batches(request.content):
        body += b"".join(batch)
        if len(body) > MAX_DOCUMENT:
            raise S3Error("EntityTooLarge", f"The document has more than {MAX_DOCUMENT} bytes.")
    expected_md5 = _content_md5(request)
    if expected_md5 is not None and hashlib.md5(body, usedforsecurity=False).digest() != expected_md5:
        raise S3Error("BadDigest", "The body's MD5 is not that of Content-MD5.")
    crc32 = request.headers.get("x-amz-checksum-crc32")
    if crc32 is not None and _base64(crc32, "x-amz-checksum-crc32") != zlib.crc32(body).to_bytes(4, "big"):
        raise S3Error("BadDigest", "The body's CRC32 is not that of x-amz-checksum-crc32.")
    if request.headers["x-amz-content-sha256"] not in (UNSIGNED, hashlib.sha256(body).hexdigest()):
        raise S3Error("XAmzContentSHA256Mismatch", "The body's SHA-256 is not the one that was signed.")
    return body


async def _batches(content: Content) -> AsyncIterator[list[bytes]]:
    """The stream as it comes, a MiB or a little more at a time (but the last), so that a thread is worth its switch."""
    try:
        async for batch in batches(content.iter_any()):
            yield batch
    except (ClientPayloadError, ConnectionError) as error:
        raise S3Error("IncompleteBody", "The connection ended before the body did.") from error


def _content_md5(request: S3Request) -> bytes | None:
    header = request.headers.get("Content-MD5")
    if header is None:
        return None
    digest = _base64(header, "Content-MD5")
    if len(digest) != 16:
        raise S3Error("InvalidDigest", "Content-MD5: expected the base64 of 16 bytes.")
    return digest


def _base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise S3Error("InvalidDigest", f"{name} is not base64.") from error

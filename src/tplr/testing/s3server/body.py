"""Receives a request's body with bounded memory, and checks every checksum that the client sent."""

import asyncio
import base64
import binascii
import hashlib
from collections.abc import AsyncIterator, Mapping

from aiohttp import ClientPayloadError

from tplr.concurrency.batches import batches
from tplr.testing.s3server.blobfile import Draft
from tplr.testing.s3server.checksums import ALGORITHMS, PREFIX, Hash, sent_checksums
from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.request import Content, S3Request
from tplr.testing.s3server.sigv4 import UNSIGNED

MAX_DOCUMENT = 4 * 2**20  # bytes: a CompleteMultipartUpload of 10,000 parts has about 1 MiB


class BodyDigests:
    """A body's MD5, and each digest that its request announces.

    Raises:
        S3Error: InvalidDigest, a header is not the base64 of a digest's bytes.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._expected: list[tuple[Hash, bytes, S3Error]] = []
        if "Content-MD5" in headers:
            self._expect("Content-MD5", headers["Content-MD5"], self._md5)
        for name, value in sent_checksums(headers).items():
            self._expect(name, value, ALGORITHMS[name.removeprefix(PREFIX)](b""))
        if (signed := headers["x-amz-content-sha256"]) != UNSIGNED:
            error = S3Error("XAmzContentSHA256Mismatch", "The body's SHA-256 is not the signed one.")
            self._expected.append((hashlib.sha256(), bytes.fromhex(signed), error))
        self._hashes = {self._md5, *(hashed for hashed, _, _ in self._expected)}

    @property
    def md5(self) -> str:
        """32 hex digits."""
        return self._md5.hexdigest()

    def update(self, block: bytes) -> None:
        for hashed in self._hashes:
            hashed.update(block)

    def check(self) -> None:
        """Raises BadDigest or XAmzContentSHA256Mismatch if the body is not the announced one."""
        for hashed, expected, error in self._expected:
            if hashed.digest() != expected:
                raise error

    def _expect(self, header: str, value: str, hashed: Hash) -> None:
        try:
            expected = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise S3Error("InvalidDigest", f"{header} is not base64.") from error
        if len(expected) != hashed.digest_size:
            raise S3Error("InvalidDigest", f"{header}: expected the base64 of {hashed.digest_size} bytes.")
        self._expected.append((hashed, expected, S3Error("BadDigest", f"The body does not match its {header}.")))


async def receive(request: S3Request, draft: Draft) -> str:
    """Streams the body into the draft and returns its MD5, 32 hex digits.

    Raises:
        S3Error: IncompleteBody, BadDigest, InvalidDigest, XAmzContentSHA256Mismatch.
    """
    digests = BodyDigests(request.headers)

    def take(batch: list[bytes]) -> None:
        for block in batch:
            digests.update(block)
            draft.write(block)

    async for batch in _batches(request.content):
        await asyncio.to_thread(take, batch)
    if draft.size != request.content_length:
        raise S3Error("IncompleteBody", f"{request.content_length} bytes were announced, {draft.size} arrived.")
    if request.digests_count:
        digests.check()
    return digests.md5


async def receive_document(request: S3Request) -> bytes:
    """A small body, whole. Raises the errors of :func:`receive`, and EntityTooLarge."""
    digests = BodyDigests(request.headers)
    body = b""
    async for batch in _batches(request.content):
        body += b"".join(batch)
        if len(body) > MAX_DOCUMENT:
            raise S3Error("EntityTooLarge", f"The document has more than {MAX_DOCUMENT} bytes.")
    digests.update(body)
    digests.check()
    return body


async def _batches(content: Content) -> AsyncIterator[list[bytes]]:
    """Yield the stream in batches of at least 1 MiB (except the last), so that a switch to a thread pays off."""
    try:
        async for batch in batches(content.iter_any()):
            yield batch
    except (ClientPayloadError, ConnectionError) as error:
        raise S3Error("IncompleteBody", "The connection ended before the body did.") from error

"""One S3 request, parsed, and the reply to it."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

from aiohttp import web

from tplr.testing.s3server.blobfile import FileSlice
from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.xmltext import document, error_document


class Content(Protocol):
    """The body of a request, read as a stream."""

    def iter_any(self) -> AsyncIterator[bytes]: ...


@dataclass(frozen=True, kw_only=True)
class S3Request:
    """A path-style request: ``/<bucket>/<key>?<query>``.

    Attributes:
        path: percent-decoded, with its leading slash.
        bucket: empty if the path is ``/``.
        key: empty if the request is about the bucket itself; otherwise any text, dots and slashes included.
        query: percent-decoded; a name without a value has the value "".
        headers: names are case-insensitive.
        content_length: bytes, None if not announced.
        content: the body, not read yet.
        digests_count: whether an object or a part that does not match its digests is refused.
    """

    method: str
    path: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    content_length: int | None
    content: Content
    digests_count: bool = True

    @classmethod
    def of(cls, request: web.Request) -> "S3Request":
        # The raw target: the signature covers it, and a key like "../x" must not be normalised.
        raw_path, _, raw_query = request.raw_path.partition("?")
        try:
            path = unquote(raw_path, errors="strict")
            pairs = [pair.partition("=") for pair in raw_query.split("&") if pair]
            query = {unquote(name, errors="strict"): unquote(value, errors="strict") for name, _, value in pairs}
        except UnicodeDecodeError as error:
            raise S3Error("InvalidArgument", f"The request's path or query is not UTF-8: {error.reason}.") from error
        bucket, _, key = path.removeprefix("/").partition("/")
        return cls(
            method=request.method,
            path=path,
            bucket=bucket,
            key=key,
            query=query,
            headers=request.headers,
            content_length=request.content_length,
            content=request.content,
        )

    def number(self, name: str, default: int) -> int:
        """A query parameter that is a number of 0 or more; raises InvalidArgument."""
        value = self.query.get(name, str(default))
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise S3Error("InvalidArgument", f"{name}: expected a number, got {value[:40]!r}.")
        return int(value)


@dataclass(frozen=True)
class Reply:
    """A reply. ``body`` is bytes, or a slice of a file; its sender streams and closes it."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | FileSlice = b""

    @classmethod
    def xml(cls, name: str, children: Mapping[str, Any]) -> "Reply":
        """A reply with the document of ``xmltext.document``."""
        return cls(headers={"Content-Type": "application/xml"}, body=document(name, children))

    @classmethod
    def error(cls, error: S3Error, resource: str) -> "Reply":
        body = error_document(error.code, error.message, resource)
        return cls(error.status, {"Content-Type": "application/xml", **error.headers}, body)

    def length(self) -> int:
        return len(self.body) if isinstance(self.body, bytes) else self.body.length

    async def blocks(self) -> AsyncIterator[bytes]:
        if isinstance(self.body, bytes):
            yield self.body
        else:
            async for block in self.body.blocks():
                yield block

    def __enter__(self) -> "Reply":
        return self

    def __exit__(self, *_: object) -> None:
        if not isinstance(self.body, bytes):
            self.body.file.close()

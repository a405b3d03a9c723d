"""Parses S3 responses: headers and XML, checked before anything uses them."""

import hashlib
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import MappingProxyType

from tplr.errors import StoreUnavailable
from tplr.schemas import ObjectInfo
from tplr.storage.base import Sink, check_announced, check_match, range_missing, whole_seconds
from tplr.storage.s3_errors import UNREADABLE, refusal
from tplr.storage.s3_http import HTTPResponse

MAX_ERROR_BYTES = 2**16
# A page of a listing has at most 1000 keys of 1024 bytes, percent-encoded: below 4 MiB.
MAX_DOCUMENT_BYTES = 8 * 2**20
# Above the size of a document, but not above that of an update.
_ALLOCATED_AHEAD = range(2**20 + 1, 2**28)

_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
# An ETag is sent back in a request header, so it may only contain valid header characters.
_ETAG = re.compile(r"[!#-~]{1,128}")
_LENGTH = re.compile(r"[0-9]{1,15}")
_MD5 = re.compile(r"[0-9a-f]{32}")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
METADATA_PREFIX = "x-amz-meta-"


@dataclass
class S3Response:
    """A response without a body; ``begin`` raises the error of an error response. A ``Receiver`` of ``s3_http``.

    Attributes:
        conditions: the request headers that this kind of response needs.
        status: HTTP status of the response.
        headers: by lower-case names; values of a repeated header are joined.
    """

    bucket: str
    key: str
    conditions: Mapping[str, str] = field(init=False, default_factory=dict)
    status: int = field(init=False, default=0)
    headers: Mapping[str, str] = field(init=False, default_factory=dict)

    def begin(self, response: HTTPResponse) -> memoryview | int:
        self.status = response.status
        self.headers = {name.lower(): response.getheader(name, "") for name in response.headers}
        if self.status not in (200, 204, 206):
            body = _read(response, MAX_ERROR_BYTES)
            if len(body) == MAX_ERROR_BYTES:
                raise self.unavailable(f"an error of more than {MAX_ERROR_BYTES} bytes")
            code = _CODE.search(body)
            raise refusal(self.status, code[1].decode() if code else "", self.headers, self.bucket, self.key)
        return 0

    def take(self, piece: memoryview) -> object:
        """Ignore the bytes: no body is expected."""

    def unavailable(self, problem: str) -> StoreUnavailable:
        return StoreUnavailable(problem, bucket=self.bucket, key=self.key)

    @property
    def etag(self) -> str:
        return self.headers.get("etag", "").strip('"')

    def info(self) -> ObjectInfo:
        """Return the object that the headers describe. Raises as ``object_info``."""
        return object_info(
            self.bucket,
            self.key,
            size=self.headers.get("content-length", ""),
            etag=self.etag,
            modified=self._time("last-modified"),
            metadata={
                name.removeprefix(METADATA_PREFIX): text
                for name, text in self.headers.items()
                if name.startswith(METADATA_PREFIX)
            },
        )

    def stored(self, size: int, metadata: Mapping[str, str]) -> ObjectInfo:
        """Return the object that this response to a PUT confirms. Raises as ``object_info``."""
        # S3 sends no Last-Modified here. Date is from the same clock, slightly later.
        return object_info(
            self.bucket, self.key, size=str(size), etag=self.etag, modified=self._time("date"), metadata=metadata
        )

    def _time(self, name: str) -> datetime | None:
        """Return a header's time; None if the header is missing or not a time."""
        try:
            return _with_zone(parsedate_to_datetime(self.headers.get(name, "")))
        except UNREADABLE:
            return None


@dataclass
class DocumentResponse(S3Response):
    """A response with an XML document of at most ``MAX_DOCUMENT_BYTES``.

    Attributes:
        root: its root element, with tags without namespace; without children if the body is empty.
    """

    root: ET.Element = field(init=False)

    def begin(self, response: HTTPResponse) -> memoryview | int:
        super().begin(response)
        body = _read(response, MAX_DOCUMENT_BYTES + 1)
        if len(body) > MAX_DOCUMENT_BYTES:
            raise self.unavailable(f"more than {MAX_DOCUMENT_BYTES} bytes of XML")
        if response.length:  # reading ends without an error, even before the first byte, if the connection is closed
            raise self.unavailable("the response arrived incomplete")
        try:
            self.root = parse_xml(body)
        except ET.ParseError as error:
            raise self.unavailable("a response that is not XML") from error
        if self.root.tag == "Error":  # S3 may fail after it has sent status 200
            raise refusal(500, self.root.findtext("Code", ""), self.headers, self.bucket, self.key)
        return 0


@dataclass(kw_only=True)
class ObjectResponse(S3Response):
    """A response with an object, or a range of it. All checks that need no body run before the body is read.

    Args:
        sink: receives the body; None keeps it in memory, for ``body``.
        byte_range: ``[start, stop)``; a negative ``start`` counts from the object's end.
        exact: the object must reach to ``stop``.
        verify: check the MD5 of a whole object in memory if its ETag is an MD5.

    Attributes:
        found: description of the whole object, set when its first byte arrives.
    """

    sink: Sink | None = None
    max_bytes: int
    if_match: str | None = None
    byte_range: tuple[int, int] | None = None
    exact: bool = True
    verify: bool = False
    found: ObjectInfo = field(init=False)

    def __post_init__(self) -> None:
        # BytesIO exposes the bytes it was created from and returns them uncopied, so a body is in memory once. The
        # zeros of large ``bytes`` take no memory until they are overwritten. Updates are as large as ``max_bytes``.
        # They are allocated here, because the allocator keeps some freed memory for each thread that allocated it.
        ahead = self.sink is None and self.max_bytes in _ALLOCATED_AHEAD
        self._buffer = io.BytesIO(bytes(self.max_bytes if ahead else 0))
        self._md5 = hashlib.md5(usedforsecurity=False)
        conditions = {} if self.if_match is None else {"If-Match": f'"{self.if_match}"'}
        if self.byte_range is not None:
            start, stop = self.byte_range
            conditions["Range"] = f"bytes={start}" if start < 0 else f"bytes={start}-{stop - 1}"
        self.conditions = conditions

    def begin(self, response: HTTPResponse) -> memoryview | int:
        super().begin(response)
        info = self.info()
        check_announced(info.size, self.max_bytes, bucket=self.bucket, key=self.key)
        check_match(info, self.if_match, bucket=self.bucket)
        self.found = replace(info, size=self._whole_size(info.size, self.byte_range)) if self.byte_range else info
        if self.sink is not None:
            return info.size
        # The ETag of an object that S3 encrypted with a KMS key looks like an MD5 but is none.
        encryption = self.headers.get("x-amz-server-side-encryption", "AES256")
        whole = self.verify and self.byte_range is None
        self.verify = whole and encryption == "AES256" and _MD5.fullmatch(info.etag) is not None
        if info.size != len(self._buffer.getbuffer()):
            self._buffer = io.BytesIO(bytes(info.size))
        return self._buffer.getbuffer()

    def take(self, piece: memoryview) -> object:
        if self.sink is not None:
            self.sink(piece)
        elif self.verify:
            self._md5.update(piece)

    def body(self) -> bytes:
        """Return the body in memory. Raises StoreUnavailable if it does not match the ETag."""
        if self.verify and self._md5.hexdigest() != self.found.etag:
            raise self.unavailable("the body arrived damaged")
        return self._buffer.getvalue()

    def _whole_size(self, received: int, wanted: tuple[int, int]) -> int:
        """Return the size of the whole object; the response must be the requested range."""
        start, stop = wanted
        if not received:  # some servers answer like this for an empty object
            raise range_missing(wanted, 0, bucket=self.bucket, key=self.key)
        match = _CONTENT_RANGE.fullmatch(self.headers.get("content-range", ""))
        first, last, size = map(int, match.groups()) if match else (0, 0, 0)
        if start < 0:
            start, stop = max(0, size + start), size
        if self.status != 206 or not match or first != start or received != last + 1 - start:
            raise self.unavailable("the store ignored the byte range")
        if last + 1 != (stop if self.exact else min(stop, size)):
            raise range_missing(wanted, size, bucket=self.bucket, key=self.key)
        return size


def _read(response: HTTPResponse, most: int) -> bytes:
    """Read a body, or its first ``most`` bytes.

    ``response.read(most)`` would read everything if the server sends a chunk with a negative size.
    """
    body = memoryview(bytearray(most))
    size = 0
    while size < most and (count := response.readinto(body[size:])):
        size += count
    return bytes(body[:size])


def object_info(
    bucket: str,
    key: str,
    *,
    size: str,
    etag: str,
    modified: datetime | None,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> ObjectInfo:
    """Return the object that headers or a listing describe. Raises StoreUnavailable if they lack a usable value."""
    if not _LENGTH.fullmatch(size) or modified is None or not _ETAG.fullmatch(etag):
        raise StoreUnavailable("a response without a usable size, ETag or time", bucket=bucket, key=key)
    return ObjectInfo(
        key=key, size=int(size), etag=etag, last_modified=whole_seconds(modified.timestamp()), metadata=dict(metadata)
    )


def xml_time(text: str) -> datetime | None:
    """Parse a document's time; None for an empty text. Raises ValueError."""
    return _with_zone(datetime.fromisoformat(text)) if text else None


def _with_zone(time: datetime) -> datetime:
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def parse_xml(body: bytes) -> ET.Element:
    """Parse a document; return its root, with tags without namespace. Raises ParseError, UnicodeDecodeError."""
    text = body.decode()
    if not text:
        return ET.Element("Empty")
    if "<!" in text:  # entities can expand a small document to a huge one
        raise ET.ParseError("declarations are not allowed")
    root = ET.fromstring(text)  # noqa: S314 - without declarations, and of bounded size
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root

"""What S3's responses say: headers and XML, checked before anything uses them."""

import hashlib
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from tplr.errors import StoreUnavailable
from tplr.schemas import ObjectInfo
from tplr.storage.base import Sink, check_announced, check_match, range_missing, whole_seconds
from tplr.storage.s3_errors import refusal
from tplr.storage.s3_http import HTTPResponse

MAX_ERROR_BYTES = 2**16
# A page of a listing is 1000 keys of 1024 bytes, percent-encoded: below 4 MiB.
MAX_DOCUMENT_BYTES = 8 * 2**20
# More than a document has, and no more than an update.
_ALLOCATED_AHEAD = range(2**20 + 1, 2**28)

_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
# An ETag goes back in a request header, so it may hold nothing that a header can't.
_ETAG = re.compile(r"[!#-~]{1,128}")
_LENGTH = re.compile(r"[0-9]{1,15}")
_MD5 = re.compile(r"[0-9a-f]{32}")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
_METADATA = "x-amz-meta-"


@dataclass(frozen=True)
class Headers:
    """The headers of a response, by lower-case names; values of a repeated header are joined."""

    status: int
    fields: Mapping[str, str]

    @property
    def etag(self) -> str:
        return self.fields.get("etag", "").strip('"')

    def time(self, name: str) -> datetime | None:
        """A date. Raises ValueError, TypeError, OverflowError if it is none."""
        if name not in self.fields:
            return None
        found = parsedate_to_datetime(self.fields[name])
        return found if found.tzinfo else found.replace(tzinfo=UTC)

    def metadata(self) -> dict[str, str]:
        return {name.removeprefix(_METADATA): text for name, text in self.fields.items() if name.startswith(_METADATA)}


class Receiver:
    """Takes a response without a body: its headers, or the error that they and the body's code stand for.

    Attributes:
        headers: there when the request has succeeded.
    """

    headers: Headers

    def __init__(self, bucket: str, key: str) -> None:
        self.bucket = bucket
        self.key = key

    def begin(self, response: HTTPResponse) -> memoryview | int:
        fields = {name.lower(): response.getheader(name, "") for name in response.headers}
        self.headers = Headers(response.status, fields)
        if response.status not in (200, 204, 206):
            body = response.read(MAX_ERROR_BYTES)
            if len(body) == MAX_ERROR_BYTES:
                raise StoreUnavailable(
                    f"an error of more than {MAX_ERROR_BYTES} bytes", bucket=self.bucket, key=self.key
                )
            code = _CODE.search(body)
            raise refusal(response.status, code[1].decode() if code else "", fields, self.bucket, self.key)
        return 0

    def take(self, piece: memoryview) -> object:
        """Nothing is expected."""

    def info(self) -> ObjectInfo:
        """What the headers say of an object, with the length of this response as its size."""
        return object_info(
            self.bucket,
            self.key,
            size=self.headers.fields.get("content-length"),
            etag=self.headers.etag,
            modified=self.headers.time("last-modified"),
            metadata=self.headers.metadata(),
        )


class DocumentReceiver(Receiver):
    """Takes an XML document of at most ``MAX_DOCUMENT_BYTES``.

    Attributes:
        root: its root element, with tags that lack their namespace; of an empty body an element without children.
    """

    root: ET.Element

    def begin(self, response: HTTPResponse) -> memoryview | int:
        super().begin(response)
        body = response.read(MAX_DOCUMENT_BYTES + 1)
        if len(body) > MAX_DOCUMENT_BYTES:
            raise StoreUnavailable(f"more than {MAX_DOCUMENT_BYTES} bytes of XML", bucket=self.bucket, key=self.key)
        try:
            self.root = parse_xml(body)
        except ET.ParseError as error:
            raise StoreUnavailable("a response that is not XML", bucket=self.bucket, key=self.key) from error
        if self.root.tag == "Error":  # S3 may find out that it fails after it has sent 200
            raise refusal(500, self.root.findtext("Code", ""), self.headers.fields, self.bucket, self.key)
        return 0


class ObjectReceiver(Receiver):
    """Takes an object, or a range of it, and gives the bytes to ``sink``; refuses the response before reading its body.

    Args:
        byte_range: ``[start, stop)``; a negative ``start`` counts from the object's end.
        exact: the object must reach to ``stop``.

    Attributes:
        found: the whole object, once its first byte has come.
    """

    found: ObjectInfo

    def __init__(
        self,
        bucket: str,
        key: str,
        *,
        sink: Sink,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
        exact: bool = True,
    ) -> None:
        super().__init__(bucket, key)
        self._sink = sink
        self._max_bytes = max_bytes
        self._if_match = if_match
        self._range = byte_range
        self._exact = exact

    def begin(self, response: HTTPResponse) -> memoryview | int:
        super().begin(response)
        info = self.info()
        check_announced(info.size, self._max_bytes, bucket=self.bucket, key=self.key)
        check_match(info, self._if_match, bucket=self.bucket)
        self.found = info if self._range is None else replace(info, size=self._whole_size(info.size, self._range))
        return info.size

    def take(self, piece: memoryview) -> object:
        return self._sink(piece)

    def _whole_size(self, received: int, wanted: tuple[int, int]) -> int:
        """Size of the whole object, if the response is the range that was asked for."""
        start, stop = wanted
        if not received:  # some servers answer so for an empty object
            raise range_missing(wanted, 0, bucket=self.bucket, key=self.key)
        match = _CONTENT_RANGE.fullmatch(self.headers.fields.get("content-range", ""))
        first, last, size = map(int, match.groups()) if match else (0, 0, 0)
        if start < 0:
            start, stop = max(0, size + start), size
        if self.headers.status != 206 or not match or first != start or received != last + 1 - start:
            raise StoreUnavailable("the store ignored the byte range", bucket=self.bucket, key=self.key)
        if last + 1 != (stop if self._exact else min(stop, size)):
            raise range_missing(wanted, size, bucket=self.bucket, key=self.key)
        return size


class BytesReceiver(ObjectReceiver):
    """As ``ObjectReceiver``, but the body goes into memory.

    Args:
        verify: hash the body of a whole object whose ETag is an MD5, and refuse it if they differ.
    """

    def __init__(
        self,
        bucket: str,
        key: str,
        *,
        max_bytes: int,
        verify: bool,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
    ) -> None:
        md5 = self._md5 = hashlib.md5(usedforsecurity=False)
        super().__init__(bucket, key, sink=md5.update, max_bytes=max_bytes, if_match=if_match, byte_range=byte_range)
        self._verify = verify and byte_range is None
        # BytesIO lends the bytes it was made from and returns them uncopied, so a body is in memory once. The zeros of
        # large ``bytes`` take no memory until they are overwritten. Updates are as large as ``max_bytes``: they are
        # allocated here, as the allocator keeps some of what it frees for each thread that allocated it.
        self._buffer = io.BytesIO(bytes(max_bytes if max_bytes in _ALLOCATED_AHEAD else 0))

    def begin(self, response: HTTPResponse) -> memoryview | int:
        size = super().begin(response)
        assert isinstance(size, int)
        if size != len(self._buffer.getbuffer()):
            self._buffer = io.BytesIO(bytes(size))
        # Of an object that S3 encrypted with a KMS key, the ETag looks like an MD5 and is none.
        encryption = self.headers.fields.get("x-amz-server-side-encryption", "AES256")
        self._verify = self._verify and encryption == "AES256" and _MD5.fullmatch(self.found.etag) is not None
        return self._buffer.getbuffer()

    def take(self, piece: memoryview) -> object:
        return self._sink(piece) if self._verify else None

    def body(self) -> bytes:
        """The whole body. Raises StoreUnavailable if it is not what its ETag says."""
        if self._verify and self._md5.hexdigest() != self.found.etag:
            raise StoreUnavailable("the body arrived damaged", bucket=self.bucket, key=self.key)
        return self._buffer.getvalue()


def object_info(
    bucket: str,
    key: str,
    *,
    size: str | None,
    etag: str,
    modified: datetime | None,
    metadata: Mapping[str, str] | None = None,
) -> ObjectInfo:
    """An object as headers or a listing describe it. Raises StoreUnavailable if they lack a usable value."""
    etag = etag.strip('"')
    if not _LENGTH.fullmatch(size or "") or modified is None or not _ETAG.fullmatch(etag):
        raise StoreUnavailable("a response without a usable size, ETag or time", bucket=bucket, key=key)
    seconds = whole_seconds(modified.timestamp())
    return ObjectInfo(key=key, size=int(size or 0), etag=etag, last_modified=seconds, metadata=dict(metadata or {}))


def xml_time(text: str | None) -> datetime | None:
    """A time of a document, with or without a time zone. Raises ValueError."""
    found = datetime.fromisoformat(text) if text else None
    return found if found is None or found.tzinfo else found.replace(tzinfo=UTC)


def parse_xml(body: bytes) -> ET.Element:
    """The root of a document, with tags that lack their namespace. Raises ParseError, UnicodeDecodeError."""
    text = body.decode()
    if not text:
        return ET.Element("Empty")
    if "<!" in text:  # entities make large documents out of small ones
        raise ET.ParseError("declarations are not allowed")
    root = ET.fromstring(text)  # noqa: S314 - without declarations, and of bounded size
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root

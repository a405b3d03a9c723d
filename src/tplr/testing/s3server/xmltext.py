"""S3's XML: writes replies, parses the two kinds of document that requests carry."""

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from xml.sax.saxutils import escape

from tplr.testing.s3server.checksums import tagged_checksums
from tplr.testing.s3server.errors import S3Error

# An XML parser reads a raw carriage return as a newline.
CARRIAGE_RETURN = {"\r": "&#13;"}
DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'
XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"


def iso_time(seconds: float) -> str:
    """ISO 8601 with milliseconds. ``seconds`` is rounded: a float holds whole milliseconds only approximately."""
    return datetime.fromtimestamp(round(seconds * 1000) / 1000, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def document(name: str, children: Mapping[str, Any]) -> bytes:
    """A document of S3's namespace.

    Args:
        children: of the root, by name. A value is a text or a number; None for no element; a mapping of the element's
            own children; or a list, with an element of this name for each item.
    """
    return f'{DECLARATION}<{name} xmlns="{XMLNS}">{_elements(children)}</{name}>'.encode()


def error_document(code: str, message: str, resource: str) -> bytes:
    return (DECLARATION + _elements({"Error": {"Code": code, "Message": message, "Resource": resource}})).encode()


def _elements(content: Mapping[str, Any]) -> str:
    named = [(name, one) for name, value in content.items() for one in (value if isinstance(value, list) else [value])]
    return "".join(f"<{name}>{_inner(value)}</{name}>" for name, value in named if value is not None)


def _inner(value: Mapping[str, Any] | str | int) -> str:
    return _elements(value) if isinstance(value, Mapping) else escape(str(value), CARRIAGE_RETURN)


@dataclass(frozen=True)
class ChosenPart:
    """A part that a ``CompleteMultipartUpload`` document names. ``etag`` has no quotes; ``checksums`` are headers."""

    number: int
    etag: str
    checksums: dict[str, str]


def parse_complete(body: bytes) -> list[ChosenPart]:
    """The parts of a ``CompleteMultipartUpload`` document, in its order."""
    parts = []
    for part in _children(body, "CompleteMultipartUpload", "Part"):
        number, etag = part.get("PartNumber", ""), part.get("ETag", "")
        if not (number.isascii() and number.isdigit() and len(number) < 10 and etag):
            raise S3Error("MalformedXML", "Each Part needs a PartNumber and an ETag.")
        parts.append(ChosenPart(int(number), etag.strip('"'), tagged_checksums(part)))
    if not parts:
        raise S3Error("MalformedXML", "CompleteMultipartUpload names no part.")
    return parts


def parse_delete(body: bytes) -> list[str]:
    """The keys of a ``Delete`` document, in its order."""
    keys = [entry.get("Key", "") for entry in _children(body, "Delete", "Object")]
    if not all(keys) or not 1 <= len(keys) <= 1000:
        raise S3Error("MalformedXML", "Delete names 1 to 1000 objects, each with a Key.")
    return keys


def _children(body: bytes, root_name: str, child_name: str) -> list[dict[str, str]]:
    """Texts of the grandchildren: ``<root><child><name>text</name>…</child>…</root>`` → one dict for each child."""
    if b"<!" in body:  # entities let a small document expand to a large one
        raise S3Error("MalformedXML", "Declarations are not allowed.")
    try:
        root = ET.fromstring(body)  # noqa: S314 - no declarations, and the caller bounds the size
    except ET.ParseError as error:
        raise S3Error("MalformedXML", f"The body is not XML: {error}.") from error
    if _local(root.tag) != root_name:
        raise S3Error("MalformedXML", f"Expected a {root_name} document.")
    return [{_local(leaf.tag): leaf.text or "" for leaf in child} for child in root if _local(child.tag) == child_name]


def _local(tag: str) -> str:
    """The tag without its namespace: some clients send one, some do not."""
    return tag.rpartition("}")[2]

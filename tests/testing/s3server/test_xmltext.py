"""Received XML is small, plain and complete, or refused; sent XML decodes to the same text."""

import xml.etree.ElementTree as ET

import pytest

from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.xmltext import ChosenPart, document, iso_time, parse_complete, parse_delete

BOMB = b'<!DOCTYPE d [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><Delete><Object><Key>&b;</Key></Object></Delete>'


def test_documents_are_read_with_and_without_their_namespace() -> None:
    part = "<Part><ETag>&quot;abc&quot;</ETag><PartNumber>7</PartNumber></Part>"
    for attribute in ("", ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'):
        text = f"<CompleteMultipartUpload{attribute}>{part}</CompleteMultipartUpload>"
        assert parse_complete(text.encode()) == [ChosenPart(7, "abc", {})]


@pytest.mark.parametrize(
    "body",
    [b"", b"<", b"<Other/>", b"<Delete/>", b"<Delete><Object/></Delete>", BOMB,
     b"<Delete>" + b"<Object><Key>a</Key></Object>" * 1001 + b"</Delete>"],
)  # fmt: skip
def test_what_is_no_delete_document_is_refused(body: bytes) -> None:
    with pytest.raises(S3Error, match="MalformedXML"):
        parse_delete(body)


@pytest.mark.parametrize("number", ["", "-1", "one", "1" * 5000])
def test_a_part_number_is_a_number(number: str) -> None:
    part = f"<Part><PartNumber>{number}</PartNumber><ETag>a</ETag></Part>"
    with pytest.raises(S3Error, match="MalformedXML"):
        parse_complete(f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode())


def test_texts_are_escaped() -> None:
    hostile = "</Key><Key>&amp;\r\n\"'"
    root = ET.fromstring(document("Result", {"Key": hostile}))
    assert [child.text for child in root] == [hostile]


def test_times_have_whole_milliseconds() -> None:
    # 1.001 as a float is a little less than that; it must not become .000.
    assert iso_time(1.001) == "1970-01-01T00:00:01.001Z"

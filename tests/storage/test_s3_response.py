"""XML documents of an untrusted server."""

from xml.etree.ElementTree import ParseError

import pytest

from tplr.storage.s3_response import parse_xml, xml_time

BOMB = b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]><x>&b;</x>'


def test_namespaces_make_no_difference() -> None:
    for text in (b"<A xmlns='http://s3'><B>1</B></A>", b"<?xml version='1.0' encoding='UTF-8'?><A><B>1</B></A>"):
        root = parse_xml(text)
        assert (root.tag, root.findtext("B")) == ("A", "1")
    assert len(parse_xml(b"")) == 0


@pytest.mark.parametrize("body", [BOMB, b"<a>", b"text", BOMB.decode().encode("utf-16")])
def test_what_is_no_plain_document(body: bytes) -> None:
    with pytest.raises((ParseError, UnicodeDecodeError)):
        parse_xml(body)


def test_times() -> None:
    assert xml_time("") is None
    for text in ("2015-10-21T07:28:00.000Z", "2015-10-21T07:28:00", "2015-10-21T09:28:00+02:00"):
        found = xml_time(text)
        assert found is not None
        assert found.timestamp() == 1445412480

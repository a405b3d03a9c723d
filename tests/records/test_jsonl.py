"""Lines and their positions, for any split of the bytes; values with and without a byte-order mark."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.errors import DataError
from tplr.records.jsonl import LineReader, check_encoding, is_blank, parse_json

BOM = b"\xef\xbb\xbf"


class Source:
    """Yields pieces; a piece of None raises once."""

    def __init__(self, pieces):
        self.pieces = list(pieces)

    def read(self) -> bytes:
        piece = self.pieces.pop(0) if self.pieces else b""
        if piece is None:
            raise OSError("broken")
        return piece


@given(pieces=st.lists(st.none() | st.text("a\r\n", min_size=1, max_size=5).map(str.encode)))
@settings(max_examples=200)
def test_lines_and_positions_do_not_depend_on_pieces_or_failures(pieces):
    data = b"".join(filter(None, pieces))
    expected = [line + b"\n" for line in data.split(b"\n")]
    expected = [line for line in [*expected[:-1], expected[-1][:-1]] if line]
    source = Source(pieces)
    reader, lines = LineReader(source.read, 100, 7), []
    while True:
        try:
            lines.append(next(reader))
        except OSError:
            continue
        except StopIteration:
            if not source.pieces:
                break
            continue
        assert reader.offset == 100 + len(b"".join(lines))
        assert reader.number == 7 + len(lines)
    assert lines == expected
    assert next(reader, None) is None


@given(lengths=st.lists(st.integers(0, 12), max_size=8), size=st.integers(1, 5))
@settings(max_examples=100)
def test_of_a_long_line_only_the_beginning_is_held(lengths, size):
    data = b"".join(b"x" * length + b"\n" for length in lengths)
    pieces = [piece for i in range(0, len(data), size) for piece in (data[i : i + size], None)]  # each with a failure
    reader, end = LineReader(Source(pieces).read, max_bytes=4), 0
    for length in lengths:
        while True:
            assert reader.offset == end  # also in the middle of a line
            try:
                line = next(reader)
                break
            except OSError:
                continue
        end += length + 1
        assert reader.offset == end
        assert (len(line) > 4) == (length + 1 > 4)
        assert len(line) <= min(length + 1, 4 + 2 * size)


def test_values():
    for text in (b'{"a": 1}\r\n', BOM + b'{"a": 1}'):
        assert parse_json(text) == {"a": 1}
    for text in (b"{", b'"\xff"', b"[" * 100_000, b"", BOM):
        with pytest.raises(ValueError):  # noqa: PT011 - the JSON library's own words
            parse_json(text)
    assert [is_blank(line) for line in (b" \r\n", BOM + b"\n", b"0\n", BOM + b"{}")] == [True, True, False, False]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_encodings_other_than_utf8_are_refused(encoding):
    first, *others = '{"t": "é"}\n{"t": "ü"}\n'.encode(encoding).splitlines(keepends=True)
    with pytest.raises(DataError, match=r"a\.jsonl line 1: expected UTF-8, got utf-"):
        check_encoding(first, "a.jsonl")
    for text in (first, others[0], '{"t": "é"}'.encode(encoding)):
        with pytest.raises(UnicodeDecodeError, match="expected UTF-8, got utf-"):
            parse_json(text)


def test_surrogates_in_utf8_are_refused():
    for mark in (b"", BOM):
        with pytest.raises(UnicodeDecodeError):
            parse_json(mark + '{"t": "\ud800"}'.encode(errors="surrogatepass"))

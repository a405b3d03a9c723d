"""Elements one at a time, from pieces of any size; what is no JSON is refused like by the standard library."""

import json
from collections.abc import Callable

import pytest

from tplr.errors import DataError
from tplr.records import json_list
from tplr.records.json_list import JsonList

VALID = [
    "[]",
    " [ ] ",
    "[1]",
    "[1, -2.5e+3 ,3]",
    '\ufeff[{"a": [1, "]"]}, "é\\ud83d\\ude00", null, NaN, -Infinity]\n',
    '{"a": [1, 2]}',
    "12e+5",
    '"text"',
    "[[], [[]], {}]",
    '["' + "x" * 300 + '", {"b": "' + "y" * 90 + '\\n"}]',
]
INVALID = [
    "",
    " ",
    "[",
    "[1,",
    "[1,]",
    "[,1]",
    "[1 2]",
    "[1]]",
    "[1] 2",
    "{} {}",
    "nul",
    '["a',
    '["\x01"]',
    "[01]",
    "]",
]
INVALID += ['{"a" 1}', "[1" + "}" * 9, '["\\x"]', '["\\u12"]', "[" * 100_000, "[" + "1" * 5000 + "]", "[1.]", "[-]"]


def pieces(data: bytes, size: int) -> Callable[[], bytes]:
    parts = iter([*(data[i : i + size] for i in range(0, len(data), size)), b""])
    return lambda: next(parts)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 2**20])
@pytest.mark.parametrize("text", VALID)
def test_any_pieces_give_the_elements(text: str, size: int) -> None:
    value = json.loads(text.removeprefix("\ufeff"))
    expected = value if isinstance(value, list) else [value]
    assert repr([*JsonList(pieces(text.encode(), size), "a.json")]) == repr(expected)


@pytest.mark.parametrize("size", [1, 3, 2**20])
@pytest.mark.parametrize("text", INVALID, ids=lambda text: text[:8])
def test_what_is_no_json_is_refused(text: str, size: int) -> None:
    elements = JsonList(pieces(text.encode(), size if len(text) < 9000 else 2**20), "a.json")
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.json is not JSON: element \d: "):
            list(elements)


def test_an_error_is_found_where_it_is() -> None:
    left = iter([b'[{"a": 1}, {"a": ' + b"oops" + b" " * 100, *[b"x" * 100] * 10**6])
    elements = JsonList(lambda: next(left), "a.json")
    assert next(elements) == {"a": 1}
    with pytest.raises(DataError, match=r"a\.json is not JSON: element 2: Expecting value"):
        next(elements)
    assert elements.read_bytes < 1000


@pytest.mark.parametrize("data", ["[1]".encode("utf-16"), "[1]".encode("utf-16-le"), b'["a", "\xff"]', b'["\xc3'])
def test_other_encodings_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match=r"a\.json.*(utf-16|utf-8)"):
        [*JsonList(pieces(data, 64), "a.json")]


def test_long_elements_are_refused_and_long_lists_are_not(monkeypatch) -> None:
    monkeypatch.setattr(json_list, "MAX_RECORD_BYTES", 100)
    assert [*JsonList(pieces(b"[" + b"[1], " * 999 + b"2]", 50), "a.json")] == [*[[1]] * 999, 2]
    for long in (b'"' + b"x" * 500, b"[" + b"0, " * 500):
        with pytest.raises(DataError, match=r"a\.json: element 2 has more than 100 characters: cut it"):
            [*JsonList(pieces(b"[0, " + long, 50), "a.json")]


def test_a_failed_read_is_repeated() -> None:
    data, at, failed = b'[{"a": 1}, {"b": "' + b"y" * 30 + b'"}, 3]', 0, 0

    def read() -> bytes:
        nonlocal at, failed
        if failed <= at:
            failed += 3
            raise OSError("broken")
        at += 2
        return data[at - 2 : at]

    elements, found = JsonList(read, "a.json"), []
    while len(found) < 3:
        try:
            found += [next(elements)]
        except OSError:
            continue
    assert found == json.loads(data)

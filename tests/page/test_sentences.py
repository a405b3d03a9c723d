"""Packed sentences are restored exactly, for any text, and equal ones take little space."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import FIRST, synthetic_document

from tplr.page.sentences import MAX_SHAPES, MAX_TEMPLATES, TOO_MANY, pack, unpack

TEXT = st.one_of(
    st.text(max_size=40),
    st.from_regex(r"[+-]?[0-9]{1,11}(\.[0-9]{0,8})?(e[+-]?[0-9]{1,2})?( [a-z]{1,3}[.,:]?)?", fullmatch=True),
    st.floats(allow_nan=True, allow_infinity=True).map(lambda x: f"{x:+.4f} and {x:g}, {x!r}"),
)
ROWS = st.lists(st.tuples(st.text(max_size=8), TEXT), max_size=5)


@given(st.lists(st.one_of(st.none(), ROWS), min_size=1, max_size=6).flatmap(lambda a: st.just({1: a, 7: a[::-1]})))
@settings(max_examples=200)
def test_what_is_packed_comes_back(rows) -> None:
    packed = pack(rows)
    for uid, windows in rows.items():
        for index, cell in enumerate(windows):
            assert unpack(packed, uid, index) == (list(cell) if cell else cell), (uid, index)


def test_numbers_are_taken_out_of_the_words() -> None:
    rows = {1: [[("gain", f"+0.{n:04d} of {n} tests")] for n in range(50)]}
    packed = pack(rows)
    assert [one.parts for one in packed.templates] == [("+", " of ", " tests")]
    assert packed.templates[0].numbers[0].deltas == (0, *[1] * 49)
    assert unpack(packed, 1, 7) == [("gain", "+0.0007 of 7 tests")]


def test_a_number_that_is_repeated_in_a_cell_is_stored_once() -> None:
    draw = random.Random(3)
    score = [draw.randrange(10**6) for _ in range(300)]
    # The weight has no sentence of this kind in some windows: its column is shorter, but has the same content.
    rows = {
        1: [
            [("final", f"0.{one:06d} in all"), *([("weight", f"from 0.{one:06d}")] if one % 3 else [])] for one in score
        ]
    }
    packed = pack(rows)
    [final] = [one for one in packed.templates if one.parts[-1] == " in all"]
    [weight] = [one for one in packed.templates if one.parts[0] == "from "]
    assert (len(final.numbers[0].deltas), weight.numbers[0].deltas) == (300, ())
    assert all(unpack(packed, 1, index) == cell for index, cell in enumerate(rows[1]))


def test_words_without_end_are_cut_off() -> None:
    words = [f"{n:b}".replace("0", "a").replace("1", "b") for n in range(MAX_TEMPLATES + 200)]
    packed = pack({1: [[("x", word)] for word in words]})
    assert len(packed.templates) <= MAX_TEMPLATES + 1
    assert unpack(packed, 1, 5) == [("x", words[5])]
    assert unpack(packed, 1, MAX_TEMPLATES + 100) == [TOO_MANY]
    # Few sentences in many different orders.
    draw = random.Random(1)
    orders = [[("x", draw.choice("abcdefgh")) for _ in range(8)] for _ in range(MAX_SHAPES + 200)]
    assert len(pack({1: orders}).shapes) <= MAX_SHAPES + 1


def test_the_explanations_of_a_run_come_back() -> None:
    document = synthetic_document(40, 5)
    packed = document.explanations
    for miner in document.miners:
        for index in range(document.windows.count):
            rows = dict(unpack(packed, miner.uid, index) or ())
            assert f"of {min(20, index + 1)} windows" in rows["evidence"], (miner.uid, FIRST + index)
            pay = miner.pay[index]
            assert pay is not None
            assert pay == 0 or rows["weight"].endswith(f"= {float(rows['weight'].split('= ')[1]):.6f}")

"""Documents: each row ended once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.pages.documents import documents
from tplr.tokenize import Ragged

EOS = 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=6))
def test_each_row_is_ended_once_and_empty_ones_are_left_out(rows):
    expected = [row if row[-1] == EOS else [*row, EOS] for row in rows if row]
    ended = documents(Ragged.of(rows), EOS)
    assert [row.tolist() for row in ended.rows()] == expected
    assert ended.offsets[-1] == len(ended.ids)

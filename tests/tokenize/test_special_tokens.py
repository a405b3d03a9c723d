"""Special tokens around rows, and truncation that leaves room for them."""

import numpy as np
import pytest

from tplr.tokenize import Ragged
from tplr.tokenize.special_tokens import SpecialTokens

ROWS = Ragged.of([[5, 6, 7], [], [8]])
BOTH = SpecialTokens(np.array([1, 2], np.int32), np.array([3], np.int32))


@pytest.mark.parametrize(
    ("special", "max_length", "expected"),
    [
        (SpecialTokens(), None, [[5, 6, 7], [], [8]]),
        (SpecialTokens(), 2, [[5, 6], [], [8]]),
        (BOTH, None, [[1, 2, 5, 6, 7, 3], [1, 2, 3], [1, 2, 8, 3]]),
        (BOTH, 5, [[1, 2, 5, 6, 3], [1, 2, 3], [1, 2, 8, 3]]),
        (BOTH, 1, [[1, 2, 3], [1, 2, 3], [1, 2, 3]]),
    ],
)
def test_rows_are_framed_and_truncated(special, max_length, expected):
    rows = special.add_to(ROWS, max_length)
    assert [row.tolist() for row in rows.rows()] == expected
    assert rows.ids.dtype == np.int32

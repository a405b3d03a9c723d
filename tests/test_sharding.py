"""Shares of ranks, for any number of ranks."""

import pytest

from tplr.errors import StateError
from tplr.sharding import check_stride, per_rank


def test_each_rank_has_an_equal_share_of_what_all_consumed():
    assert [per_rank(12, world) for world in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]
    assert per_rank(0, 7) == 0
    with pytest.raises(StateError, match="after 12 samples, which can't be divided among 5 ranks"):
        per_rank(12, 5)


@pytest.mark.parametrize(("interval", "offset"), [(0, 0), (-1, 0), (2, 2), (2, -1)])
def test_an_offset_outside_the_interval_is_refused(interval, offset):
    with pytest.raises(ValueError, match="0 <= offset < interval"):
        check_stride(interval, offset)
    check_stride(2, 1)

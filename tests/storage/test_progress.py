"""Progress of a transfer is logged at intervals, and not at all for a short one."""

import logging

import pytest

from tplr.storage.progress import SECONDS_BETWEEN, ProgressLog


def test_a_long_transfer_tells_how_far_it_is_and_a_short_one_nothing(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    progress = ProgressLog("fetching k", now=lambda: now)
    with caplog.at_level(logging.INFO):
        for second in range(1, 3 * int(SECONDS_BETWEEN) + 1):
            now = float(second)
            progress(2 * second * 10**6, 100 * 10**6)
            if second < SECONDS_BETWEEN:
                assert caplog.messages == []
    assert caplog.messages == [f"fetching k: {2 * second} of 100 MB, 2.0 MB/s" for second in (10, 20, 30)]

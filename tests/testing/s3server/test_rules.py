"""The rate of writes per key: one second from the last admitted write."""

import pytest

from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.rules import WriteRate


def test_the_second_counts_from_the_last_admitted_write() -> None:
    rate = WriteRate()
    rate.admit("b", "k", 10.0)
    for now in (10.0, 10.5, 10.999):
        with pytest.raises(S3Error, match="TooManyRequests"):
            rate.admit("b", "k", now)
    rate.admit("b", "k", 11.0)
    rate.admit("b", "other", 11.0)
    rate.admit("other", "k", 11.0)
    with pytest.raises(S3Error, match="TooManyRequests"):
        rate.admit("b", "k", 11.5)


def test_what_no_longer_matters_is_forgotten() -> None:
    rate = WriteRate()
    for number in range(1000):
        rate.admit("b", str(number), number * 0.1)
    assert len(rate._last) <= 11
    rate.admit("b", "999", 50.0)  # a clock set back does not lock a key

"""A random stream follows from its names alone."""

import numpy as np
import pytest

from tplr.scale.draws import log_normal, stream


def test_streams_by_name() -> None:
    first, again, other = (stream(1, "a", window).random(4) for window in (3, 3, 4))
    assert (first == again).all()
    assert not (first == other).any()


def test_log_normal() -> None:
    found = log_normal(stream(1, "b"), 5.0, 0.2, 20_000)
    assert np.median(found) == pytest.approx(5.0, rel=0.02)
    assert np.log(found).std() == pytest.approx(0.2, rel=0.05)

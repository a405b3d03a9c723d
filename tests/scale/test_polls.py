"""The closed form for the number of polls, against counting."""

import numpy as np
import pytest

from tplr.exchange.polling import pause_after
from tplr.scale.polls import count_polls


@pytest.mark.parametrize("waited", [0.0, 0.4, 3.0, 30.0, 150.0, 1200.0])
def test_as_counted(waited: float) -> None:
    request, now, polls = 0.1, 0.0, 1
    while now < waited:
        now += request + pause_after(now + request, 0.5)
        polls += 1
    assert count_polls(np.array(waited), shortest=0.5, request=request) == pytest.approx(polls, rel=0.08, abs=1.0)

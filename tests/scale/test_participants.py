"""Samples of participants: medians and spreads as specified, one stream for each purpose."""

import numpy as np
import pytest

from tplr.scale.participants import Assumptions, Participants, Requests


def test_medians_are_as_assumed_and_validators_have_their_own_links() -> None:
    assumed = Assumptions(validator_down=2e9)
    found = Participants.draw(assumed, uids=4000, validators=1000, seed=3)
    assert np.median(found.down[1000:]) * 8 == pytest.approx(500e6, rel=0.03)
    assert np.median(found.down[:1000]) * 8 == pytest.approx(2e9, rel=0.05)
    assert np.median(found.up) * 8 == pytest.approx(110e6, rel=0.03)
    assert np.log(found.up).std() == pytest.approx(0.3, rel=0.05)
    assert found.dead[1000:].mean() == pytest.approx(0.02, abs=0.01)
    assert not found.dead[:1000].any()


def test_a_change_of_one_assumption_changes_no_other_draw() -> None:
    one, other = (
        Participants.draw(assumed, uids=50, validators=5, seed=1) for assumed in (Assumptions(), Assumptions(up=1e9))
    )
    assert (one.down == other.down).all()
    assert (one.merit == other.merit).all()
    assert not (one.up == other.up)[5:].any()


def test_requests_have_a_tail_and_outages_their_share() -> None:
    requests = Requests(Assumptions(outages=(0.1, 50.0), regional=(0.0, 1.0)), seed=1)
    seconds = requests.seconds("get", 1, (100, 100))
    assert np.median(seconds) == pytest.approx(0.11, rel=0.05)
    assert (seconds > 2).mean() == pytest.approx(0.01, abs=0.004)
    begins, ends = requests.outages(1, 5000, 1200.0)
    assert (ends > begins).mean() == pytest.approx(0.1, abs=0.02)
    assert (ends - begins)[ends > begins].mean() == pytest.approx(50.0, rel=0.15)

"""Weights that a validator without a model can copy, and when: with sealed and with public reports."""

from pathlib import Path

import pytest
from reports import score_report

from tplr.localnet.attackers.scores import Copied, copied_weights, overlap
from tplr.localnet.simulation import VALIDATOR, new_signer, profile
from tplr.schemas import PeerScore, ScoreReport

CLEAR = profile("sparseloco").model_copy(update={"sealed_scores": False})
EPOCH, LAST = CLEAR.windows_per_weights, 26


def report(window: int) -> ScoreReport:
    """A hundredth of the pay moves from one miner to another in each window; no miner is paid in the first five."""
    share = 0.2 + window / 100
    weights = {"1": share, "2": 1 - share} if window > 5 else {}
    scores = {"1": PeerScore(hotkey="miner", final=share)}
    return score_report(window, uid=VALIDATOR, peer_scores=scores, weights=weights)


@pytest.mark.parametrize(
    ("sealed", "reveal", "late", "age"),
    [
        (False, 0, False, 0),
        (True, 0, False, EPOCH),
        (True, 0, True, 0),  # the chain shows weights at once, and so sealing gains no more than a block
        (True, EPOCH, False, EPOCH),
        (True, EPOCH, True, EPOCH),
        (True, 2 * EPOCH, True, 2 * EPOCH),
    ],
)
async def test_what_is_copied_is_as_old_as_what_can_be_read(
    tmp_path: Path, sealed: bool, reveal: int, late: bool, age: int
) -> None:
    hparams = CLEAR.model_copy(update={"sealed_scores": sealed})
    reports = [report(window) for window in range(1, LAST + 1)]
    signer = new_signer(hparams, VALIDATOR)
    found = await copied_weights(reports, hparams, signer, tmp_path, reveal=reveal, late=late)
    assert len(found) == (LAST - 6) // EPOCH + 1
    nothing = age // EPOCH  # epochs at first
    assert found[:nothing] == [Copied(None, 0.0)] * nothing
    assert [one.age for one in found[nothing:]] == [age] * (len(found) - nothing)
    assert [one.overlap for one in found[nothing:]] == pytest.approx([1 - age / 100] * (len(found) - nothing))


def test_overlap_is_what_both_pay() -> None:
    assert overlap({1: 0.5, 2: 0.5}, {2: 0.2, 3: 0.8}) == 0.2
    assert overlap({1: 1.0}, {1: 1.0}) == 1.0
    assert overlap({}, {1: 1.0}) == 0.0

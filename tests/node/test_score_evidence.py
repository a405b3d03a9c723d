"""Evidence of score reports is read once, and only for windows that may count."""

import pytest

from tplr.errors import ObjectNotFound
from tplr.hparams import load_hparams
from tplr.node.score_evidence import ScoreEvidence
from tplr.schemas import PeerObservation, ScoreReport

HPARAMS = load_hparams().model_copy(update={"pay_windows": 4})
VALIDATOR = 7


def report(window: int, *, follows_from: tuple[int, ...] | None = None) -> ScoreReport:
    return ScoreReport(
        window=window,
        uid=VALIDATOR,
        profile="hardened",
        held_out_pages="",
        faults=(),
        observations={"1": PeerObservation(hotkey="somebody")},
        alignment=None,
        follows_from=tuple(range(max(0, window - 3), window)) if follows_from is None else follows_from,
        peer_scores={},
        struck={},
        weights={},
        weights_set=None,
    )


class Reports:
    def __init__(self, *missing: int) -> None:
        self.missing = missing
        self.read: list[int] = []

    async def get_scores(self, uid: int, window: int) -> ScoreReport:
        assert uid == VALIDATOR
        self.read.append(window)
        if window in self.missing:
            raise ObjectNotFound("gone", bucket="b", key="k")
        return report(window)


async def test_each_report_is_read_once() -> None:
    reports = Reports()
    evidence = ScoreEvidence(reports, HPARAMS)
    for window in range(5, 20):
        assert await evidence.shares(report(window), VALIDATOR)
    assert sorted(reports.read) == [2, 3, 4]
    assert len(evidence._known) <= 2 * HPARAMS.pay_windows
    # An older window again: dropped evidence is read again.
    assert await evidence.shares(report(6), VALIDATOR)
    assert sorted(reports.read)[:6] == [2, 3, 3, 4, 4, 5]


async def test_without_an_earlier_report_nothing_follows() -> None:
    evidence = ScoreEvidence(Reports(4), HPARAMS)
    assert await evidence.shares(report(6), VALIDATOR) is None
    assert await evidence.shares(report(8), VALIDATOR)


@pytest.mark.parametrize("follows_from", [(1, 4, 5), (5, 4), (5, 5), (4, 5, 6), (4, 5, 9)])
async def test_windows_that_can_not_count_are_not_read(follows_from) -> None:
    reports = Reports()
    assert await ScoreEvidence(reports, HPARAMS).shares(report(6, follows_from=follows_from), VALIDATOR) is None
    assert not reports.read

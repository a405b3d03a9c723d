"""Every factor and reason of a miner's score in words, with numbers that multiply up."""

import re

from tplr.schemas import ScoreReport, WeightsSet
from tplr.scoring.board import ScoreBoard
from tplr.scoring.explain import explain


def report(constants, observation, **changes) -> ScoreReport:
    board = ScoreBoard(constants())
    for window in range(3):
        seen = {1: observation(1, copied="stale", copied_from=7), 2: observation(2)}
        outcome = board.see(seen, window)
    made = ScoreReport(
        window=2,
        uid=0,
        profile="hardened",
        random_pages="",
        faults=("who is in sync is not known: no answer",),
        observations={str(uid): one for uid, one in seen.items()},
        peer_scores={str(uid): one for uid, one in outcome.peer_scores.items()},
        struck={str(uid): codes for uid, codes in outcome.struck.items()},
        weights={str(uid): weight for uid, weight in board.weights.items()},
        weights_set=WeightsSet(block=77, intended={"1": 0.25}, on_chain={"1": 0.2499}),
    )
    return made.model_copy(update=changes)


def test_every_factor_and_reason_is_named(constants, observation) -> None:
    made = report(constants, observation)
    text = explain(made, 1, beta=50.0, power=2.0)
    for part in (
        "uid 1 (hotkey-1) in window 2",
        "valid; on the peer list, sampled for evaluation",
        "stale: repeats the update of uid 7",
        "stale x 0.0156 (struck in this window): its update repeats one of an earlier window",
        "loss 4.0000 -> 3.9200: +2.000 %",
        "0.250000 set in block 77, 0.249900 read back",
        "who is in sync is not known: no answer: nobody is judged by it",
    ):
        assert part in text
    peer_score = made.peer_scores["1"]
    final = float(re.search(r"base x [\d.]+ = ([\d.]+)", text)[1])
    assert abs(final - peer_score.final) < 1e-6
    weight = float(re.search(r"weight .* = ([\d.]+)", text)[1])
    assert abs(weight - made.weights["1"]) < 1e-6


def test_unknown_uid_names_those_that_are_known(constants, observation) -> None:
    assert "knows no such miner in window 2; it knows 1, 2" in explain(
        report(constants, observation), 9, beta=50, power=2
    )


def test_a_seal_fits_one_report_alone(constants, observation) -> None:
    sealed = report(constants, observation).sealed()
    assert sealed == sealed.sealed()
    assert ScoreReport.model_validate_json(sealed.model_dump_json()).sealed() == sealed
    assert sealed.model_copy(update={"window": 3}).sealed().seal != sealed.seal

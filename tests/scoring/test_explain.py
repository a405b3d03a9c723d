"""Every factor and reason of a miner's score in words, with numbers that multiply up."""

import re
from typing import Any

import pytest

from tplr.errors import PayloadError
from tplr.schemas import OUT_OF_SYNC, UNREAD, ScoreReport, WeightsSet
from tplr.scoring.explain import explain
from tplr.scoring.profiles import score_board
from tplr.seeds import Profile

UIDS = range(1, 7)


@pytest.fixture
def report(constants, observation, evidence):
    def make(profile: Profile = "hardened", changes: dict[str, Any] | None = None, **first: Any) -> ScoreReport:
        """After three windows; ``first`` changes what was seen of uid 1 in the last, ``changes`` the report."""
        board = score_board(constants(profile))
        last, outcome = evidence(0, {}), None
        for window in range(3):
            seen = {uid: observation(uid, **(first if uid == 1 and window == 2 else {})) for uid in UIDS}
            last = evidence(window, seen)
            if profile == "documented":
                last = last.model_copy(update={"alignment": None})
            outcome = board.see(last)
        assert outcome is not None
        made = ScoreReport(
            window=2,
            uid=0,
            profile=profile,
            held_out_pages="",
            faults=("who is in sync is not known: no answer",),
            observations=last.observations,
            alignment=last.alignment,
            follows_from=board.follows_from,
            peer_scores={str(uid): one for uid, one in outcome.peer_scores.items()},
            struck={str(uid): codes for uid, codes in outcome.struck.items()},
            weights={str(uid): weight for uid, weight in board.weights.items()},
            weights_set=WeightsSet(block=77, intended={"1": 0.25}, on_chain={"1": 0.2499}),
        )
        return made.model_copy(update=changes or {})

    return make


def test_every_factor_is_named(report) -> None:
    made = report()
    text = explain(made, 1, power=2.0)
    for part in (
        "uid 1 (hotkey-1) in window 2",
        "valid; on the peer list, sampled for evaluation",
        "loss 4.0000 -> 3.9200: +2.000 %",
        "predicted gain    +0.3000 in this window",
        "own-pages test    +1.000 of 1",
        "its update is in the included set, and was measured",
        "of 3 windows; its update was measured in 3 of them",
        "+0.3000 for a step of length 1, standard error 0.0000",
        "1.0000 after 3 tests (0 at a mean of 0.25, 1 at 0.5; by loss -0.2 and 0, less chance)",
        "0.250000 set in block 77, 0.249900 read back",
        "who is in sync is not known: no answer: nobody is judged by it",
    ):
        assert part in text
    factors = re.search(r"final score +([\d.]+) x ([\d.]+) x ([\d.]+) = ([\d.]+)", text)
    assert factors is not None
    credit, own_pages, calibration, final = map(float, factors.groups())
    assert credit * own_pages * calibration == pytest.approx(final, abs=2e-6)
    assert final == pytest.approx(made.peer_scores["1"].final, abs=1e-6)
    weight = re.search(r"weight .* = ([\d.]+)", text)
    assert weight is not None
    assert float(weight[1]) == pytest.approx(made.weights["1"], abs=1e-6)


def test_a_report_that_contradicts_itself_is_one_error(report) -> None:
    """Its author alone has checked how its parts fit together."""
    with pytest.raises(PayloadError, match="contradicts itself, and explains nothing: KeyError"):
        explain(report().model_copy(update={"observations": {}}), 1, power=2.0)


@pytest.mark.parametrize(
    ("seen", "part"),
    [
        ({"assigned_pages": False, "evaluation": None}, "wrong_pages: its update names other pages than it was given"),
        ({"behind": OUT_OF_SYNC}, "this window       zero: a rule struck"),
        ({"behind": UNREAD}, "its own report    not readable: its bucket refused, or did not answer"),
        (
            {"verdict": "too_late", "included": False, "assigned_pages": None, "evaluation": None},
            "zero: its update is not in the included set",
        ),
        ({"sampled": False, "evaluation": None}, "not sampled for evaluation"),
        ({"listed": False, "included": False, "probation": True}, "valid; on probation, sampled for evaluation"),
    ],
)
def test_every_reason_is_named(report, seen, part) -> None:
    assert part in explain(report(**seen), 1, power=2.0)


def test_a_window_that_was_not_measured_is_blank(report) -> None:
    blind = report(changes={"alignment": None})
    assert "blank: its update is in the included set, and this validator could not" in explain(blind, 1, power=2.0)


def test_documented_factors(report) -> None:
    made = report("documented", copied="copied_indices", copied_from=7, evaluation=None)
    text = explain(made, 1, power=2.0)
    for part in (
        "copied_indices: repeats the update of uid 7",
        "copied_indices x 0.5000 (struck in this window): its update has the coordinates of another one",
        "after 2 evaluations",
    ):
        assert part in text
    final = re.search(r"base x [\d.]+ = (-?[\d.]+)", text)
    assert final is not None
    assert float(final[1]) == pytest.approx(made.peer_scores["1"].final, abs=1e-6)


def test_unknown_uid_names_those_that_are_known(report) -> None:
    assert "knows no such miner in window 2; it knows 1, 2, 3, 4, 5, 6" in explain(report(), 9, power=2)


def test_a_seal_fits_one_report_alone(report) -> None:
    sealed = report().sealed()
    assert sealed == sealed.sealed()
    assert ScoreReport.model_validate_json(sealed.model_dump_json()).sealed() == sealed
    assert sealed.model_copy(update={"window": 3}).sealed().seal != sealed.seal


def test_one_miner_s_explanation_compares_no_other_s_update(report, monkeypatch) -> None:
    """Of 256 miners all comparisons take seconds; a page explains each of them."""
    compared: list[int] = []
    monkeypatch.setattr("tplr.scoring.own_pages._ahead", lambda _, mine, *more: compared.append(mine) or float(mine))
    made = report()
    seen = made.observations
    tested = {uid: seen[uid].model_copy(update={"assigned_products": (0.3, 0.2, 0.1, 0.3, 0.2, 0.1)}) for uid in "135"}
    text = explain(made.model_copy(update={"observations": {**seen, **tested}}), 3, power=2.0)
    assert "own-pages test    +2.00 deviations ahead of others on its own pages" in text
    assert compared == [2, 2, 2]


def test_what_strangers_wrote_commands_no_terminal_and_adds_no_line(report) -> None:
    hostile = "\x1b[2J\nweight            1.0"
    made = report(changes={"faults": ("one",)})
    seen = made.observations["1"].model_copy(update={"hotkey": hostile, "verdict": hostile})
    lying = made.model_copy(update={"observations": {**made.observations, "1": seen}, "faults": (hostile,)})
    text = explain(lying, 1, power=2.0)
    assert "\x1b" not in text
    assert len(text.splitlines()) == len(explain(made, 1, power=2.0).splitlines())
    assert text.count(r"\x1b[2J\nweight") == 3

"""Every factor and reason of a miner's score in words, with numbers that multiply to the score."""

import re
from typing import Any

import pytest

from tplr.errors import PayloadError
from tplr.schemas import OUT_OF_SYNC, UNREAD, Evidence, PeerScore, ScoreReport, WeightsSet
from tplr.scoring.board import CreditShares, MeasuredWindow
from tplr.scoring.calibration import Calibration
from tplr.scoring.explain import explain, shares_of
from tplr.scoring.profiles import score_board
from tplr.seeds import Profile

UIDS = range(1, 7)


@pytest.fixture
def report(constants, observation, evidence):
    def make(profile: Profile = "hardened", changes: dict[str, Any] | None = None, **first: Any) -> ScoreReport:
        """Return a report after three windows; ``first`` changes the last observation of uid 1, ``changes`` the
        report."""
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
    text = explain(made, 1, power=2.0, shares=None)
    for part in (
        "uid 1 (hotkey-1) in window 2",
        "valid; on the peer list, sampled for evaluation",
        "loss 4.0000 -> 3.9200: +2.000 %",
        "predicted gain    +0.3000 in this window",
        "own-pages test    +1.000 of 1",
        "its update is in the included set, and was measured",
        "of 3 windows; its update was measured in 3 of them",
        "+0.3000 in the measured windows, standard error 0.0000",
        "peer list         not recomputed: an earlier report cannot be read; merit ",
        "1.0000 after 3 tests (0 at a mean of 0.25, 1 at 0.5; by loss -0.2 and 0, after 2 standard errors are added)",
        "0.250000 set in block 77, 0.249900 read back",
        "who is in sync is not known: no answer: no miner is blamed for it",
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
    """Only its author has checked that its parts are consistent."""
    with pytest.raises(PayloadError, match="inconsistent, no explanation: KeyError"):
        explain(report().model_copy(update={"observations": {}}), 1, power=2.0, shares=None)


@pytest.mark.parametrize(
    ("seen", "part"),
    [
        ({"assigned_pages": False, "evaluation": None}, "wrong_pages: its update is not for its assigned pages"),
        ({"behind": OUT_OF_SYNC}, "this window       0: a strike"),
        ({"behind": UNREAD}, "its own report    not readable: its bucket refused, or did not answer"),
        (
            {"verdict": "too_late", "included": False, "assigned_pages": None, "evaluation": None},
            "0: its update is not in the included set",
        ),
        ({"sampled": False, "evaluation": None}, "not sampled for evaluation"),
        ({"listed": False, "included": False, "probation": True}, "valid; on probation, sampled for evaluation"),
    ],
)
def test_every_reason_is_named(report, seen, part) -> None:
    assert part in explain(report(**seen), 1, power=2.0, shares=None)


def test_a_window_that_was_not_measured_is_blank(report) -> None:
    blind = report(changes={"alignment": None})
    assert "no value: its update is in the included set, but this validator could not" in explain(
        blind, 1, power=2.0, shares=None
    )


def test_documented_factors(report) -> None:
    made = report("documented", copied="copied_indices", copied_from=7, evaluation=None)
    text = explain(made, 1, power=2.0, shares=None)
    for part in (
        "copied_indices: repeats the update of uid 7",
        "copied_indices x 0.5000 (struck in this window): its update repeats the coordinates of another one",
        "after 2 evaluations",
    ):
        assert part in text
    final = re.search(r"base x [\d.]+ = (-?[\d.]+)", text)
    assert final is not None
    assert float(final[1]) == pytest.approx(made.peer_scores["1"].final, abs=1e-6)


def test_unknown_uid_names_those_that_are_known(report) -> None:
    assert "not in the report of validator 0 for window 2, which has 1, 2, 3, 4, 5, 6" in explain(
        report(), 9, power=2, shares=None
    )


def test_a_seal_fits_one_report_alone(report) -> None:
    sealed = report().sealed()
    assert sealed == sealed.sealed()
    assert ScoreReport.model_validate_json(sealed.model_dump_json()).sealed() == sealed
    assert sealed.model_copy(update={"window": 3}).sealed().seal != sealed.seal


def test_one_miner_s_explanation_compares_no_other_s_update(report, monkeypatch) -> None:
    """All comparisons of 256 miners take seconds, and a page explains each miner."""
    compared: list[int] = []
    made = report()
    monkeypatch.setattr("tplr.scoring.own_pages._ahead", lambda _, mine, *more: compared.append(mine) or float(mine))
    products = (0.3, 0.2, 0.1, 0.3, 0.2, 0.1)
    seen = {
        uid: one.model_copy(update={"assigned_products": products} if uid in "135" else {"sampled": False})
        for uid, one in made.observations.items()
    }
    text = explain(made.model_copy(update={"observations": seen}), 3, power=2.0, shares=None)
    assert "own-pages test    +2.00 deviations ahead of others on its own pages" in text
    gain = "predicted gain    +0.1000 in this window: inner product of its step and the validator's gradient, median"
    assert f"{gain} over those on held-out pages and on the pages of 2 other miners" in text
    assert compared == [2, 2, 2]
    seen["3"] = seen["3"].model_copy(update={"assigned_products": ()})
    text = explain(made.model_copy(update={"observations": seen}), 3, power=2.0, shares=None)
    assert "own-pages test    missing by the validator's own fault: counts 0 if other" in text


def test_what_strangers_wrote_commands_no_terminal_and_adds_no_line(report) -> None:
    hostile = "\x1b[2J\nweight            1.0"
    made = report(changes={"faults": ("one",)})
    seen = made.observations["1"].model_copy(update={"hotkey": hostile, "verdict": hostile})
    lying = made.model_copy(update={"observations": {**made.observations, "1": seen}, "faults": (hostile,)})
    text = explain(lying, 1, power=2.0, shares=None)
    assert "\x1b" not in text
    assert len(text.splitlines()) == len(explain(made, 1, power=2.0, shares=None).splitlines())
    assert text.count(r"\x1b[2J\nweight") == 3


# --- credit: every number leads to the next one, and to the report's pay ----------------------------------------------

WINDOWS = 5
NUMBER = r"([+-]?[\d.]+)"


@pytest.fixture
def explained(constants, observation, evaluation, evidence):
    """Return the rows of uid 1 by name, after windows in which uids 1 and 2 send the same update (``alike``: the
    product with uid 2)."""

    def make(
        *, alike: float = 0.1, gains: tuple[float, ...] = (0.3,) * WINDOWS, readable: bool = True, **first: Any
    ) -> tuple[dict[str, str], PeerScore]:
        hparams = constants()
        board, windows, outcome = score_board(hparams), [], None
        for window, gain in enumerate(gains):
            seen = {uid: observation(uid, **(first if uid == 1 else {})) for uid in UIDS}
            made: Evidence = evidence(window, seen, uid_1=gain)
            assert made.alignment is not None
            gram = list(made.alignment.gram)
            gram[1] = alike  # of uids 1 and 2
            made = made.model_copy(update={"alignment": made.alignment.model_copy(update={"gram": tuple(gram)})})
            windows.append(MeasuredWindow(made, hparams))
            outcome = board.see(made)
        assert outcome is not None
        report = ScoreReport(
            window=len(gains) - 1,
            uid=0,
            profile="hardened",
            held_out_pages="",
            faults=(),
            observations=windows[-1].evidence.observations,
            alignment=windows[-1].evidence.alignment,
            follows_from=board.follows_from,
            peer_scores={str(uid): one for uid, one in outcome.peer_scores.items()},
            struck={},
            weights={},
            weights_set=None,
        )
        text = explain(report, 1, power=2.0, shares=shares_of(report, windows if readable else windows[1:], 3))
        score = report.peer_scores["1"]
        assert isinstance(score, PeerScore)
        return {line[:18].strip(): line[18:] for line in text.splitlines()}, score

    return make


def multiplied(rows: dict[str, str], score: PeerScore) -> tuple[float, float]:
    """Check every step from the mean gain to the credit; return the part beyond chance and the own part."""
    chance = re.fullmatch(rf"{NUMBER} x \(1 - \(2 x {NUMBER} / {NUMBER}\)\^2\) = {NUMBER}", rows["beyond chance"])
    assert chance is not None
    mean, error, same, beyond = map(float, chance.groups())
    assert rows["mean gain"].startswith(f"+{mean:.6f}, standard error {error:.6f}: over the windows that count")
    assert mean == same
    assert mean * (1 - (2 * error / mean) ** 2) == pytest.approx(beyond, abs=5e-6)
    credit = re.fullmatch(rf"{NUMBER} x {NUMBER} = {NUMBER}", rows["credit"])
    assert credit is not None
    assert float(credit[1]) == beyond
    assert rows["own part"].startswith(credit[2])
    assert beyond * float(credit[2]) == pytest.approx(score.credit, abs=2e-6)
    assert float(credit[3]) == pytest.approx(score.credit, abs=1e-6)
    assert rows["final score"].startswith(f"{credit[3]} x ")
    return beyond, float(credit[2])


def test_the_credit_of_an_honest_miner(explained) -> None:
    """Its gain is the scaled one of the counted windows, not the cosine of the measured ones."""
    rows, score = explained(gains=(0.31, 0.26, 0.33, 0.27, 0.3))
    beyond, own = multiplied(rows, score)
    assert 0.2 < beyond < 0.294
    assert own == 1.0
    assert rows["own part"] == "1.000000 of the gain beyond chance: shared with no other miner"
    assert rows["trust"] == "step 4 of 4: its own-pages factor is at least 1"
    assert "this one's by 1.0000" in rows["mean gain"]


def test_the_credit_of_a_miner_whose_windows_do_not_all_count(explained) -> None:
    rows, score = explained(included=False, listed=False)
    assert rows["mean cosine"].startswith("+0.3000 in the measured windows")
    assert rows["beyond chance"] == "0: the mean gain is not above 2 standard errors"
    assert rows["credit"] == "0: no gain beyond chance"
    assert score.credit == 0.0


@pytest.mark.parametrize(
    ("gains", "place"),
    [
        ((0.31, 0.26, 0.33, 0.27, 0.3), "earns a place: its mean cosine is above 4 standard errors"),
        ((0.3, 0.3), "not proven: 2 updates were measured: it is judged from 3 on"),
        ((0.3, 0.3, -0.3, -0.3, 0.3, 0.3), "no place: "),
    ],
)
def test_the_place_on_the_peer_list_has_a_reason(explained, gains: tuple[float, ...], place: str) -> None:
    rows, score = explained(gains=gains)
    assert rows["peer list"].startswith(place)
    assert rows["peer list"].endswith(f"; merit {score.merit:.6f}, by which a full list is ordered")
    assert ("some of its updates in succession increased the loss" in rows["peer list"]) == (min(gains) < 0)
    rows, _ = explained(gains=gains, readable=False)
    assert rows["peer list"].startswith("not recomputed: an earlier report cannot be read")


@pytest.mark.parametrize("tested", [True, False])
def test_the_credit_of_a_miner_without_trust_has_a_reason(explained, evaluation, tested) -> None:
    fails = evaluation(assigned=0.005, held_out=0.01)
    rows, score = explained(**({"evaluation": fails} if tested else {"evaluation": None}))
    assert score.own_pages == 0.0
    assert rows["trust"] == "step 0 of 4: its own-pages factor is 0, so it shares no gain"
    assert rows["credit"] == "0: no trust"
    assert rows["own pages"].startswith("0.0000 after 5 tests (mean indicator -" if tested else "0: not tested")
    assert "beyond chance" not in rows


def test_the_credit_of_a_clone_is_shared_with_whom_it_repeats(explained) -> None:
    rows, score = explained(alike=1.0)
    _, own = multiplied(rows, score)
    assert own == pytest.approx(0.5, abs=0.02)
    part = re.search(rf"; {NUMBER} of it is shared with equally trusted miners \(uid 2: {NUMBER}\)$", rows["own part"])
    assert part is not None
    assert part[1] == part[2]
    assert own + float(part[1]) == pytest.approx(1.0, abs=2e-6)


@pytest.mark.parametrize(
    ("assigned", "trust"),
    [
        (0.0096, "step 1 of 4: its own-pages factor is above 0"),
        (0.0097, "step 3 of 4: its own-pages factor is at least 0.5"),
    ],
)
def test_who_repeats_a_more_trusted_miner_is_told_who_is_paid_before_it(explained, evaluation, assigned, trust) -> None:
    rows, score = explained(alike=1.0, evaluation=evaluation(assigned=assigned, held_out=0.01))
    assert 0 < score.own_pages < 1
    _, own = multiplied(rows, score)
    assert own < 0.05
    assert rows["trust"] == trust
    assert re.search(rf"; {NUMBER} of it is shared with more trusted miners \(uid 2: {NUMBER}\)$", rows["own part"])


def test_a_credit_whose_evidence_is_gone_says_so(explained) -> None:
    rows, score = explained(readable=False)
    told = "not recomputed: an earlier report cannot be read"
    assert rows["credit"] == f"{score.credit:.6f}; {told}"
    assert not {"mean gain", "beyond chance", "own part"} & rows.keys()


def test_a_credit_that_does_not_follow_is_named(report) -> None:
    made = report()
    known = dict.fromkeys(UIDS, Calibration(by_loss=1.0, by_gradient=0.5, by_middle=0.9, by_length=0.75))
    shares = CreditShares(credits={}, steps=dict.fromkeys(UIDS, 0), scale=1.0, calibrations=known)
    text = explain(made, 1, power=2.0, shares=shares)
    assert (
        "but 1.0000 by measured losses, 0.5000 by the gradient there, 0.9000 by the gradient in the middle of the "
        "steps, 0.7500 by the lengths of its steps follow from" in text
    )
    credit = made.peer_scores["1"].credit
    assert f"{credit:.6f}, but 0.000000 follows from the published evidence: see tplr audit" in text


def test_where_lengths_are_not_compared_nothing_is_said_of_work(report) -> None:
    """With DeMo all steps have one length."""
    for by_length, work in ((None, ""), (0.75, " and that its work explains")):
        known = dict.fromkeys(UIDS, Calibration(by_loss=1.0, by_gradient=0.5, by_middle=0.9, by_length=by_length))
        shares = CreditShares(credits={}, steps=dict.fromkeys(UIDS, 0), scale=1.0, calibrations=known)
        text = explain(report(), 1, power=2.0, shares=shares)
        assert f"gains that shows on held-out pages{work}, relative to other miners'; but 1.0000 by measured" in text


def test_documented_scores_share_no_credit(report) -> None:
    assert shares_of(report("documented"), [], 3) is None

"""A window's step: no penalty pays, no order matters, a restart loses nothing, a new hotkey keeps nothing."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.errors import StateError
from tplr.hparams import HParams, load_hparams
from tplr.schemas import OUT_OF_SYNC, VALID, Evaluation, PeerObservation, PeerScore, Reason
from tplr.scoring.board import FIRST_BINARY, ScoreBoard, step, weights
from tplr.scoring.penalties import RULES

SCORES = {"openskill_tau": 0.1, "binary_score_ma_alpha": 0.05, "power_normalisation": 2.0}
LIMITS = {"sync_max_steps_behind": 3, "reset_inactive_windows": 25}
HARDENED = load_hparams().model_copy(update={"profile": "hardened", "openskill_beta": 50.0, **SCORES, **LIMITS})
DOCUMENTED = HARDENED.model_copy(update={"profile": "documented", "openskill_beta": 7.0})
UIDS = range(5)

# Each takes an observation and makes it one of a miner that did something wrong, nothing else changed.
NO_UPDATE: dict[str, Any] = {
    "evaluation": None,
    "own_pages": None,
    "copied": None,
    "copied_from": None,
    "norm_ratio": None,
}
WRONGS: dict[str, dict[str, Any]] = {
    **{reason.value: {"verdict": reason.value, **NO_UPDATE} for reason in Reason if reason is not Reason.UNAVAILABLE},
    "wrong_pages": {"own_pages": False, "evaluation": None},
    "copied_indices": {"copied": "copied_indices", "copied_from": 0},
    "stale": {"copied": "stale", "copied_from": 0},
    "outsized": {"norm_ratio": 1e6},
    "another_model": {"behind": OUT_OF_SYNC},
    "far_behind": {"behind": 4},
    "inactive": {"active": False},
}


@st.composite
def evaluations(draw: st.DrawFn) -> Evaluation:
    after = st.floats(min_value=3.0, max_value=6.0)
    return Evaluation(
        own_before=4.0,
        own_after=draw(st.none() | after),
        own_error=0.1,
        own_sequences=8,
        random_before=5.0,
        random_after=draw(st.none() | after),
        random_error=0.1,
        random_sequences=8,
    )


@st.composite
def observations(draw: st.DrawFn, uid: int) -> PeerObservation:
    chosen = draw(st.booleans())
    clean = PeerObservation(
        hotkey=f"hotkey-{uid}",
        listed=True,
        chosen=chosen,
        verdict=VALID,
        own_pages=True,
        evaluation=draw(evaluations()) if chosen else None,
        behind=draw(st.sampled_from([0, 0, 1, 3])),
        copied="",
        norm_ratio=1.0,
        active=True,
    )
    wrong = draw(st.none() | st.sampled_from(sorted(WRONGS)))
    return clean.model_copy(update=WRONGS[wrong]) if wrong else clean


def windows(count: int) -> st.SearchStrategy[list[dict[int, PeerObservation]]]:
    return st.lists(st.fixed_dictionaries({uid: observations(uid) for uid in UIDS}), min_size=1, max_size=count)


def run(constants: HParams, seen: list[dict[int, PeerObservation]]) -> dict[int, PeerScore]:
    peer_scores: dict[int, PeerScore] = {}
    for window, one in enumerate(seen):
        peer_scores = step(peer_scores, one, window, constants).peer_scores
    return peer_scores


def rank(peer_scores: Mapping[int, PeerScore], uid: int) -> int:
    return sum(one.final > peer_scores[uid].final for one in peer_scores.values())


@pytest.mark.parametrize("constants", [HARDENED, DOCUMENTED], ids=["hardened", "documented"])
@settings(max_examples=60, deadline=None)
@given(seen=windows(3), uid=st.sampled_from(UIDS), wrong=st.sampled_from(sorted(WRONGS)))
def test_no_penalty_raises_a_score_or_a_rank(constants, seen, uid, wrong) -> None:
    """Of two miners of which one also did something wrong, that one never has more."""
    last = seen[-1][uid].model_copy(update={"verdict": VALID, "own_pages": True, "copied": "", "norm_ratio": 1.0})
    last = last.model_copy(update={"behind": 0, "active": True})
    if constants.profile == "documented":
        # Documented, who withholds an update is not ranked, and so may be spared what a bad one costs.
        last = last.model_copy(update={"evaluation": None, "chosen": False})
    elif last.chosen and last.evaluation is None:
        last = last.model_copy(update={"chosen": False})
    innocent = run(constants, [*seen[:-1], {**seen[-1], uid: last}])
    guilty = run(constants, [*seen[:-1], {**seen[-1], uid: last.model_copy(update=WRONGS[wrong])}])
    assert guilty[uid].final <= innocent[uid].final
    assert rank(guilty, uid) >= rank(innocent, uid)
    assert weights(guilty, constants).get(uid, 0.0) <= weights(innocent, constants).get(uid, 0.0)


@pytest.mark.parametrize("bad", [1, 3])
@pytest.mark.parametrize("wrong", ["malformed", "missing", "wrong_pages"])
def test_withholding_bad_updates_never_pays(observation, evaluation, wrong: str, bad: int) -> None:
    """Neither in those windows nor in any after them, with good updates ever after."""
    sent = observation(1, evaluation=evaluation(own=-0.02, random=-0.01))
    withheld = sent.model_copy(update=WRONGS[wrong])
    good = {uid: observation(uid) for uid in (1, 2, 3)}
    for after in (0, 1, 3, 10, 19, 30):
        one, other = (run(HARDENED, [{**good, 1: first}] * bad + [good] * after) for first in (sent, withheld))
        assert other[1].final <= one[1].final
        assert weights(other, HARDENED).get(1, 0.0) <= weights(one, HARDENED).get(1, 0.0)


@pytest.mark.parametrize("after", [0, 1, 5, 30])
def test_being_away_until_all_is_forgotten_pays_off_no_penalty(observation, after: int) -> None:
    good = {uid: observation(uid) for uid in (1, 2, 3)}
    copies = [{**good, 1: observation(1, copied="stale", copied_from=2)}] * 10
    unseen, gone = PeerObservation(hotkey="hotkey-1"), PeerObservation(hotkey="hotkey-1", active=False)
    one, other = (run(HARDENED, [*copies, *[{**good, 1: idle}] * 25, *[good] * after]) for idle in (unseen, gone))
    assert other[1].final <= one[1].final
    assert (other[1].inactive > 0) == (after == 0)


@settings(max_examples=30, deadline=None)
@given(seen=windows(3), order=st.permutations(UIDS))
def test_permuted_uids_give_permuted_scores(seen, order) -> None:
    plain = run(HARDENED, seen)
    renamed = [{order[uid]: one[uid] for uid in order} for one in seen]  # other uids, given in another order
    assert run(HARDENED, renamed) == {order[uid]: plain[uid] for uid in UIDS}


@settings(max_examples=20, deadline=None)
@given(seen=windows(4), cut=st.integers(0, 3))
def test_a_restart_gives_the_same_bytes(seen, cut) -> None:
    def record(board: ScoreBoard, start: int, stop: int) -> str:
        for window in range(start, stop):
            board.see(seen[window], window)
        return json.dumps(board.state_dict())

    whole = record(ScoreBoard(HARDENED), 0, len(seen))
    first, second = ScoreBoard(HARDENED), ScoreBoard(HARDENED)
    second.load_state_dict(json.loads(record(first, 0, min(cut, len(seen)))))
    assert record(second, min(cut, len(seen)), len(seen)) == whole


@settings(max_examples=20, deadline=None)
@given(seen=windows(3))
def test_scores_are_finite_and_hardened_ones_never_negative(seen) -> None:
    for peer_score in run(HARDENED, seen).values():
        assert 0 <= peer_score.final < math.inf
        assert all(0 <= value < 1 for value in peer_score.multipliers.values())


def test_a_new_hotkey_keeps_nothing_and_who_leaves_is_forgotten(observation) -> None:
    before = run(HARDENED, [{uid: observation(uid) for uid in (1, 2, 3)}])
    stranger = PeerObservation(hotkey="somebody else")
    after = step(before, {1: observation(1), 2: stranger}, 1, HARDENED).peer_scores
    assert after[2] == PeerScore(hotkey="somebody else", waiting=2, binary=FIRST_BINARY)
    assert after[1].evaluations == 2
    assert sorted(after) == [1, 2]
    assert step(after, {2: observation(2)}, 2, HARDENED).peer_scores[2].evaluations == 1  # nor does who comes back


def test_what_was_not_seen_moves_nothing(observation) -> None:
    """Our own data, network, clock or bucket failed: every score stays to the last bit, penalties included."""
    before = run(HARDENED, [{1: observation(1), 2: observation(2, copied="stale")}] * 2)
    for blank in (
        PeerObservation(hotkey="hotkey-1"),
        PeerObservation(hotkey="hotkey-1", listed=True, chosen=True, verdict=Reason.UNAVAILABLE.value),
        PeerObservation(hotkey="hotkey-1", listed=True, chosen=True, verdict=VALID, own_pages=True, active=True),
    ):
        blanks = {1: blank, 2: blank.model_copy(update={"hotkey": "hotkey-2"})}
        outcome = step(before, blanks, 2, HARDENED)
        assert outcome.struck == {}
        for uid in (1, 2):
            assert outcome.peer_scores[uid] == before[uid].model_copy(update={"waiting": 2})


def test_multipliers_strike_and_recover(observation) -> None:
    late = observation(1, **{**WRONGS["too_late"], "chosen": False})
    good = observation(1, chosen=False, evaluation=None)
    peer_score = run(HARDENED, [{1: late}, {1: late}])[1]
    assert peer_score.multipliers == {"late": 0.75**2}
    peer_score = run(HARDENED, [{1: late}, {1: late}, {1: good}])[1]
    assert peer_score.multipliers == {"late": pytest.approx(0.75**2 + 1 / 20)}
    assert run(HARDENED, [{1: late}, *[{1: good}] * 6])[1].multipliers == {}


def test_documented_penalties_last_until_the_next_evaluation(observation) -> None:
    better, worse = observation(1), observation(2, evaluation=None, chosen=False)
    start = run(DOCUMENTED, [{1: better, 2: observation(2)}] * 5)
    base = start[1].base
    assert start[1].final == base
    missing = better.model_copy(update={**WRONGS["missing"], "chosen": False})
    slashed = step(start, {1: missing, 2: worse}, 5, DOCUMENTED).peer_scores
    assert slashed[1].final == pytest.approx(0.75 * base) if base > 0 else base
    behind = better.model_copy(update={"behind": 4, "evaluation": None, "chosen": False})
    again = step(slashed, {1: behind, 2: worse}, 6, DOCUMENTED).peer_scores
    assert again[1].binary == pytest.approx(0.75 * start[1].binary)
    assert again[1].multipliers == {"missing": 0.75, "out_of_sync": 0.75}
    malformed = better.model_copy(update={**WRONGS["malformed"], "chosen": False})
    assert step(start, {1: malformed, 2: worse}, 5, DOCUMENTED).peer_scores[1].final == min(0.0, base)
    assert step(again, {1: better, 2: worse}, 7, DOCUMENTED).peer_scores[1].multipliers == {}


def test_who_was_to_be_evaluated_and_sent_nothing_is_ranked_last(observation) -> None:
    bad = observation(1, **WRONGS["malformed"])
    after = run(HARDENED, [{1: bad, 2: observation(2), 3: observation(3)}])
    assert after[1].mu < after[2].mu == after[3].mu
    assert after[1].binary == pytest.approx(0.95 * FIRST_BINARY - 0.05)
    assert after[1].final == 0.0  # nothing is earned before the first evaluation
    assert after[1].signs == (-1,)


def test_persistent_negatives(observation, evaluation) -> None:
    bad = observation(1, evaluation=evaluation(own=0.02, random=-0.01))
    seen = [{1: observation(1)}] * 3 + [{1: bad}] * 5
    assert run(HARDENED, seen[:-1])[1].multipliers == {}
    assert run(HARDENED, seen)[1].multipliers == {"negatives": 0.25}


def test_inactive_is_forgotten_in_the_end(observation) -> None:
    gone = PeerObservation(hotkey="hotkey-1", active=False)
    peer_score = run(HARDENED, [{1: observation(1)}, *[{1: gone}] * 24])[1]
    assert peer_score.inactive == 24
    assert peer_score.multipliers == {"inactive": pytest.approx(0.75**24)}
    peer_score = run(HARDENED, [{1: observation(1)}, *[{1: gone}] * 25])[1]
    assert peer_score.multipliers == {"inactive": pytest.approx(0.75**25)}  # what is owed stays
    assert peer_score.model_copy(update={"multipliers": {}, "signs": ()}) == PeerScore(hotkey="hotkey-1", inactive=25)
    peer_score = run(DOCUMENTED, [{1: observation(1)}, *[{1: gone}] * 25])[1]
    assert peer_score == PeerScore(hotkey="hotkey-1", inactive=25)


def luck(
    skill: Mapping[int, float], own: Mapping[int, float], windows: int, seed: int
) -> list[dict[int, PeerObservation]]:
    """Windows of miners of these skills: ranks by skill and chance, and own pages better by so many standard errors on
    average; both spread as in ``scripts/simulate_attackers.py``."""
    random, seen = np.random.default_rng(seed), []
    for _ in range(windows):
        one = {}
        for uid in skill:
            score = 0.01 * (skill[uid] + 0.15 * random.standard_normal())
            error = 0.0005
            better = score + error * (own[uid] + 1.7 * random.standard_normal())
            measured = Evaluation(
                own_before=1.0,
                own_after=1.0 - better,
                own_error=error * 0.8,
                own_sequences=64,
                random_before=1.0,
                random_after=1.0 - score,
                random_error=error * 0.6,
                random_sequences=64,
            )
            one[uid] = PeerObservation(
                hotkey=f"{uid}", listed=True, chosen=True, verdict=VALID, own_pages=True, evaluation=measured, behind=0
            )
        seen.append(one)
    return seen


def test_equal_miners_are_paid_alike() -> None:
    """Of twenty networks of three equal miners, in all but one nobody is paid much more than another, early or late."""
    most = {3: 1.6, 7: 1.6, 20: 1.5}
    spreads: dict[int, list[float]] = {windows: [] for windows in most}
    for seed in range(20):
        seen = luck(dict.fromkeys(range(3), 1.0), dict.fromkeys(range(3), 3.5), 20, seed)
        for windows, found in spreads.items():
            paid = weights(run(HARDENED, seen[:windows]), HARDENED).values()
            found.append(max(paid) / min(paid))
    for windows, found in spreads.items():
        assert sorted(found)[-2] < most[windows]
        assert sorted(found)[len(found) // 2] < 1.25


def test_thirty_windows_tell_better_miners_from_worse_and_those_who_train_elsewhere() -> None:
    skill = {0: 0.8, 1: 1.0, 2: 1.2, 3: 1.4}
    for seed in range(10):
        found = run(HARDENED, luck(skill, {0: 1.5, 1: 2.5, 2: 4.5, 3: 0.0}, 30, seed))
        paid = weights(found, HARDENED)
        assert paid[0] < paid[1] < paid[2]
        assert paid.get(3, 0.0) < paid[0]  # best on held-out pages, and no better on those it was given


def test_foreign_state_is_refused_and_changes_nothing(observation) -> None:
    board = ScoreBoard(HARDENED)
    board.see({1: observation(1)}, 0)
    state, held = board.state_dict(), dict(board.peer_scores)
    foreign = [{}, {**state, "version": 1}, {**state, "more": 1}, {**state, "standings": {"1": {"x": 1}}}]
    for wrong in (*foreign, {**state, "standings": {"1": {**state["standings"]["1"], "mu": "high"}}}):
        with pytest.raises(StateError, match="scores: "):
            board.load_state_dict(wrong)
    assert board.peer_scores == held


def test_every_rule_has_a_name_of_its_own_and_only_takes() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert 0 <= rule.hardened < 1
        assert rule.documented is None or 0 <= rule.documented < 1
        assert rule.recovery > 0

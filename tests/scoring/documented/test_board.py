"""A window's step of the documented profile: penalties never pay, order has no effect, a restart loses nothing."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.errors import StateError
from tplr.hparams import load_hparams
from tplr.schemas import (
    OUT_OF_SYNC,
    UNREAD,
    VALID,
    DocumentedScore,
    Evaluation,
    Evidence,
    LossChange,
    PeerObservation,
    Reason,
)
from tplr.scoring.documented.board import DocumentedBoard, step
from tplr.scoring.documented.penalties import RULES
from tplr.scoring.weights import power_normalise

DOCUMENTED = load_hparams().model_copy(
    update={"profile": "documented", "power_normalisation": 2.0, "sync_max_steps_behind": 3}
)
UIDS = range(5)
NO_UPDATE: dict[str, Any] = {"evaluation": None, "assigned_pages": None, "copied": None, "copied_from": None}
# Each changes an observation into one of a miner with a single fault.
WRONGS: dict[str, dict[str, Any]] = {
    **{reason.value: {"verdict": reason.value, **NO_UPDATE} for reason in Reason if reason is not Reason.UNAVAILABLE},
    "copied_indices": {"copied": "copied_indices", "copied_from": 0},
    "another_model": {"behind": OUT_OF_SYNC},
    "unread": {"behind": UNREAD},
    "far_behind": {"behind": 4},
    "inactive": {"active": False},
}


@pytest.fixture
def seen(observation):
    """Return one observation, with the additional records of the documented profile."""

    def make(uid: int = 1, **changes: Any) -> PeerObservation:
        return observation(uid, **{"copied": "", "active": True, **changes})

    return make


@st.composite
def observations(draw: st.DrawFn, uid: int) -> PeerObservation:
    after = st.none() | st.floats(min_value=3.0, max_value=6.0)
    sampled = draw(st.booleans())
    measured = Evaluation(
        assigned=LossChange(before=4.0, after=draw(after), error=0.1, sequences=8),
        held_out=LossChange(before=5.0, after=draw(after), error=0.1, sequences=8),
    )
    clean = PeerObservation(
        hotkey=f"hotkey-{uid}",
        listed=True,
        sampled=sampled,
        verdict=VALID,
        assigned_pages=True,
        evaluation=measured if sampled else None,
        behind=draw(st.sampled_from([0, 0, 1, 3])),
        copied="",
        active=True,
    )
    wrong = draw(st.none() | st.sampled_from(sorted(WRONGS)))
    return clean.model_copy(update=WRONGS[wrong]) if wrong else clean


def windows(count: int) -> st.SearchStrategy[list[dict[int, PeerObservation]]]:
    return st.lists(st.fixed_dictionaries({uid: observations(uid) for uid in UIDS}), min_size=1, max_size=count)


def run(seen: list[dict[int, PeerObservation]]) -> dict[int, DocumentedScore]:
    peer_scores: dict[int, DocumentedScore] = {}
    for window, one in enumerate(seen):
        peer_scores, _ = step(peer_scores, one, window, DOCUMENTED)
    return peer_scores


def weights(peer_scores: Mapping[int, DocumentedScore]) -> dict[int, float]:
    return power_normalise({uid: one.final for uid, one in peer_scores.items()}, 2.0)


@settings(max_examples=60)
@given(seen=windows(3), uid=st.sampled_from(UIDS), wrong=st.sampled_from(sorted(WRONGS)))
def test_no_penalty_raises_a_score_or_a_weight(seen, uid, wrong) -> None:
    """Of two equal miners, the one with an additional fault never has more. Neither was evaluated: a miner that
    withholds an update is not ranked, so it may avoid the cost of a bad update.
    """
    last = seen[-1][uid].model_copy(update={"verdict": VALID, "assigned_pages": True, "copied": "", "behind": 0})
    last = last.model_copy(update={"active": True, "evaluation": None, "sampled": False})
    innocent = run([*seen[:-1], {**seen[-1], uid: last}])
    guilty = run([*seen[:-1], {**seen[-1], uid: last.model_copy(update=WRONGS[wrong])}])
    assert guilty[uid].final <= innocent[uid].final
    assert weights(guilty).get(uid, 0.0) <= weights(innocent).get(uid, 0.0)


@settings(max_examples=30)
@given(seen=windows(3), order=st.permutations(UIDS))
def test_permuted_uids_give_permuted_scores(seen, order) -> None:
    plain = run(seen)
    renamed = [{order[uid]: one[uid] for uid in order} for one in seen]  # other uids, given in another order
    assert run(renamed) == {order[uid]: plain[uid] for uid in UIDS}


@settings(max_examples=20)
@given(seen=windows(4), cut=st.integers(0, 3))
def test_a_restart_gives_the_same_bytes(seen, cut) -> None:
    def record(board: DocumentedBoard, start: int, stop: int) -> str:
        for window in range(start, stop):
            found = {str(uid): one for uid, one in seen[window].items()}
            board.see(Evidence(window=window, observations=found))
        return json.dumps(board.state_dict())

    whole = record(DocumentedBoard(DOCUMENTED), 0, len(seen))
    first, second = DocumentedBoard(DOCUMENTED), DocumentedBoard(DOCUMENTED)
    second.load_state_dict(json.loads(record(first, 0, min(cut, len(seen)))))
    assert record(second, min(cut, len(seen)), len(seen)) == whole


@settings(max_examples=20)
@given(seen=windows(3))
def test_scores_are_finite(seen) -> None:
    for peer_score in run(seen).values():
        assert math.isfinite(peer_score.final)
        assert all(0 <= value < 1 for value in peer_score.multipliers.values())


def test_a_new_hotkey_keeps_nothing_and_who_leaves_is_forgotten(seen) -> None:
    before = run([{uid: seen(uid) for uid in (1, 2, 3)}])
    stranger = PeerObservation(hotkey="somebody else")
    after, _ = step(before, {1: seen(1), 2: stranger}, 1, DOCUMENTED)
    assert after[2] == DocumentedScore(hotkey="somebody else", waiting=2)
    assert after[1].evaluations == 2
    assert sorted(after) == [1, 2]
    assert step(after, {2: seen(2)}, 2, DOCUMENTED)[0][2].evaluations == 1  # nor does a miner that returns


def test_what_was_not_seen_moves_nothing(seen) -> None:
    """The validator's own data, network, clock or bucket failed: every score stays the same to the last bit, including
    penalties."""
    before = run([{1: seen(1), 2: seen(2, copied="copied_indices")}] * 2)
    for blank in (
        PeerObservation(hotkey="hotkey-1"),
        PeerObservation(hotkey="hotkey-1", listed=True, sampled=True, verdict=Reason.UNAVAILABLE.value),
        PeerObservation(hotkey="hotkey-1", listed=True, sampled=True, verdict=VALID, assigned_pages=True, active=True),
    ):
        after, struck = step(before, {1: blank, 2: blank.model_copy(update={"hotkey": "hotkey-2"})}, 2, DOCUMENTED)
        assert struck == {}
        for uid in (1, 2):
            assert after[uid] == before[uid].model_copy(update={"waiting": 2})


def test_penalties_last_until_the_next_evaluation(seen) -> None:
    better, worse = seen(1), seen(2, evaluation=None, sampled=False)
    start = run([{1: better, 2: seen(2)}] * 5)
    base = start[1].base
    assert start[1].final == base
    missing = better.model_copy(update={**WRONGS["missing"], "sampled": False})
    slashed, _ = step(start, {1: missing, 2: worse}, 5, DOCUMENTED)
    assert slashed[1].final == pytest.approx(0.75 * base) if base > 0 else base
    behind = better.model_copy(update={"behind": 4, "evaluation": None, "sampled": False})
    again, _ = step(slashed, {1: behind, 2: worse}, 6, DOCUMENTED)
    assert again[1].binary == pytest.approx(0.75 * start[1].binary)
    assert again[1].multipliers == {"missing": 0.75, "out_of_sync": 0.75}
    malformed = better.model_copy(update={**WRONGS["malformed"], "sampled": False})
    assert step(start, {1: malformed, 2: worse}, 5, DOCUMENTED)[0][1].final == min(0.0, base)
    assert step(again, {1: better, 2: worse}, 7, DOCUMENTED)[0][1].multipliers == {}


def test_inactive_is_forgotten_in_the_end(seen) -> None:
    gone = PeerObservation(hotkey="hotkey-1", active=False)
    peer_score = run([{1: seen(1)}, *[{1: gone}] * 24])[1]
    assert peer_score.inactive == 24
    assert peer_score.multipliers == {"inactive": pytest.approx(0.75**24)}
    assert run([{1: seen(1)}, *[{1: gone}] * 25])[1] == DocumentedScore(hotkey="hotkey-1", inactive=25)


def test_foreign_state_is_refused_and_changes_nothing(seen) -> None:
    board = DocumentedBoard(DOCUMENTED)
    board.see(Evidence(window=0, observations={"1": seen(1)}))
    state, held = board.state_dict(), dict(board.peer_scores)
    foreign = [{}, {**state, "version": 1}, {**state, "more": 1}, {**state, "peer_scores": {"1": {"x": 1}}}]
    for wrong in (*foreign, {**state, "peer_scores": {"1": {**state["peer_scores"]["1"], "mu": "high"}}}):
        with pytest.raises(StateError, match="scores: "):
            board.load_state_dict(wrong)
    assert board.peer_scores == held


def test_every_rule_has_a_name_of_its_own_and_only_takes() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)
    assert all(0 <= rule.factor < 1 for rule in RULES)

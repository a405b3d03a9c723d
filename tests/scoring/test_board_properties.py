"""Whatever validators observe, scores are finite, uids do not matter, and a restart changes nothing."""

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observed import HPARAMS, UIDS, WRONGS, paid

from tplr.schemas import VALID, Alignment, Evaluation, Evidence, LossChange, PeerObservation
from tplr.scoring.board import Board


@st.composite
def observations(draw: st.DrawFn, uid: int) -> PeerObservation:
    loss = st.floats(min_value=3.0, max_value=6.0)
    sampled = draw(st.booleans())
    measured = Evaluation(
        assigned=LossChange(before=4.0, after=draw(st.none() | loss), error=0.1, sequences=8),
        held_out=LossChange(before=5.0, after=draw(st.none() | loss), error=0.1, sequences=8),
    )
    clean = PeerObservation(
        hotkey=f"hotkey-{uid}",
        listed=True,
        included=True,
        sampled=sampled,
        verdict=VALID,
        assigned_pages=True,
        evaluation=measured if sampled else None,
        behind=draw(st.sampled_from([None, 0, 0, 3])),
    )
    wrong = draw(st.none() | st.sampled_from(sorted(WRONGS)))
    return clean.model_copy(update=WRONGS[wrong]) if wrong else clean


@st.composite
def histories(draw: st.DrawFn, count: int = 4) -> list[Evidence]:
    found = []
    for window in range(draw(st.integers(1, count))):
        seen = {uid: draw(observations(uid)) for uid in UIDS}
        measured = [uid for uid, one in seen.items() if one.verdict == VALID and one.assigned_pages]
        blind = draw(st.booleans()) and not draw(st.booleans())
        random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        vectors = random.standard_normal((len(measured), 4))
        gram = vectors @ vectors.T
        alignment = Alignment(
            uids=tuple(measured),
            products=tuple(random.uniform(-1, 1, len(measured)).round(6).tolist()),
            norms=tuple(random.uniform(0, 50, len(measured)).round(6).tolist()),
            gram=tuple(gram[np.triu_indices(len(measured))].round(6).tolist()),
        )
        if measured and not blind:
            for uid in [uid for uid, one in seen.items() if one.sampled and draw(st.booleans())]:
                tested = tuple(random.uniform(-1, 1, len(measured)).round(6).tolist())
                seen[uid] = seen[uid].model_copy(update={"assigned_products": tested})
        found.append(
            Evidence(
                window=window,
                observations={str(uid): one for uid, one in seen.items()},
                alignment=alignment if measured and not blind else None,
            )
        )
    return found


def renamed(one: Evidence, order: Mapping[int, int]) -> Evidence:
    """Return the same evidence with other uids."""
    seen = {str(order[int(uid)]): each for uid, each in reversed(one.observations.items())}
    before = one.alignment
    if before is None:
        return one.model_copy(update={"observations": seen})
    count = len(before.uids)
    upper = np.zeros((count, count))
    upper[np.triu_indices(count)] = before.gram
    whole = upper + np.triu(upper, 1).T
    rows = sorted(range(count), key=lambda row: order[before.uids[row]])
    for uid, each in seen.items():
        tested = tuple(each.assigned_products[row] for row in rows) if each.assigned_products else ()
        seen[uid] = each.model_copy(update={"assigned_products": tested})
    alignment = Alignment(
        uids=tuple(order[before.uids[row]] for row in rows),
        products=tuple(before.products[row] for row in rows),
        norms=tuple(before.norms[row] for row in rows),
        gram=tuple(whole[np.ix_(rows, rows)][np.triu_indices(count)].tolist()),
    )
    return one.model_copy(update={"observations": seen, "alignment": alignment})


@settings(max_examples=40)
@given(history=histories())
def test_scores_are_finite_never_negative_and_sum_to_one(history) -> None:
    board = Board(HPARAMS)
    for one in history:
        board.see(one)
    assert all(0 <= one.final < float("inf") for one in board.peer_scores.values())
    assert not board.weights or sum(board.weights.values()) == pytest.approx(1.0)
    assert paid(history) == board.peer_scores


@settings(max_examples=40)
@given(history=histories(), order=st.permutations(UIDS))
def test_permuted_uids_give_permuted_scores(history, order) -> None:
    """Uids change only the last bits of sums."""
    names: dict[int, int] = dict(zip(UIDS, order, strict=True))
    plain, other = paid(history), paid([renamed(one, names) for one in history])
    for uid in UIDS:
        assert other[names[uid]].final == pytest.approx(plain[uid].final, rel=1e-6, abs=1e-9)
        assert other[names[uid]].tests == plain[uid].tests


@settings(max_examples=25)
@given(history=histories(), cut=st.integers(0, 3))
def test_a_restart_gives_the_same_bytes(history, cut) -> None:
    def record(board: Board, windows: Sequence[Evidence]) -> str:
        for one in windows:
            board.see(one)
        return json.dumps(board.state_dict())

    whole = Board(HPARAMS)
    record(whole, history)
    first, second = Board(HPARAMS), Board(HPARAMS)
    second.load_state_dict(json.loads(record(first, history[:cut])))
    assert second.peer_scores == first.peer_scores
    assert record(second, history[cut:]) == json.dumps(whole.state_dict())
    assert second.peer_scores == whole.peer_scores

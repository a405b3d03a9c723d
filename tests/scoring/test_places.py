"""A place on the peer list is given to who helps beyond chance, and lost by harm, copies and too few updates."""

from collections.abc import Iterable

import numpy as np
import pytest
from observed import HPARAMS, UIDS, WRONGS, good

from tplr.schemas import Evidence, published
from tplr.scoring.board import Board
from tplr.scoring.credit import gram_of
from tplr.scoring.places import DISPROVING_TESTS, PROVING_WINDOWS

PROVING = max(PROVING_WINDOWS, HPARAMS.probation_windows)


def test_who_harms_after_it_has_earned_its_place_loses_it_within_the_windows_of_probation(
    observation, evidence
) -> None:
    random = np.random.default_rng(2)
    board = Board(HPARAMS.model_copy(update={"pay_windows": 20}))

    def see(window: int, **gains: float) -> None:
        board.see(
            evidence(window, good(observation), **{f"uid_{uid}": 0.3 + 0.05 * random.normal() for uid in UIDS} | gains)
        )

    for window in range(12):
        see(window)
    see(12, uid_1=-0.1, uid_2=-0.3)
    assert board.proven(1)
    assert board.proven(2)
    for window in range(13, 12 + PROVING):
        see(window, uid_2=-0.3)
    assert board.proven(1)  # one bad window is not enough
    assert board.peer_scores[2].mean > 4 * board.peer_scores[2].error  # over all its windows
    assert board.proven(2) is False


@pytest.mark.parametrize(("harmful", "period"), [(5, 20), (2, 8)])
def test_who_harms_now_and_then_loses_its_place_until_that_is_long_ago(
    observation, evidence, harmful: int, period: int
) -> None:
    """Its own spread is large because it helps and harms in turn: by that alone, harm would be chance."""
    random, first = np.random.default_rng(2), 12
    board, found = Board(HPARAMS.model_copy(update={"pay_windows": 20})), []
    for window in range(first + period):
        harms = window >= first and (window - first) % period < harmful
        gains = {f"uid_{uid}": 0.3 + 0.05 * random.normal() for uid in UIDS}
        board.see(evidence(window, good(observation), **gains | ({"uid_1": -0.3} if harms else {})))
        found.append(board.proven(1))
        assert [board.proven(uid) for uid in UIDS[1:]] == [True if window > 1 else None] * (len(UIDS) - 1)
    assert found[first : first + 2] == [True, False]
    assert set(found[first + 2 :]) == {False}


STRUCK = {**{wrong: WRONGS[wrong] for wrong in ("another_model", "unread", "far_behind")}, "outsized": {}}


def with_norm(evidence: Evidence, uid: int, norm: float) -> Evidence:
    """Return the evidence in which the update of ``uid`` has this norm, and the largest honest norm is 10."""
    assert evidence.alignment is not None
    norms = tuple(norm if one == uid else 1.0 for one in evidence.alignment.uids)
    changed = evidence.alignment.model_copy(update={"norms": norms, "largest_norm": 10.0})
    return evidence.model_copy(update={"alignment": changed})


@pytest.mark.parametrize("gains", [(-0.3, -0.3), (0.3, 0.3), (-0.2, 0.3, 0.3, -0.2)])
@pytest.mark.parametrize("wrong", STRUCK)
def test_harm_counts_where_a_rule_is_broken(observation, evidence, wrong: str, gains: tuple[float, ...]) -> None:
    """Such updates earn nothing, but may be applied. They are judged as if they broke none."""
    random, first = np.random.default_rng(2), 12
    board = Board(HPARAMS.model_copy(update={"pay_windows": 20}))
    for window in range(first + len(gains) + 3):
        seen, found = good(observation), {f"uid_{uid}": 0.3 + 0.05 * random.normal() for uid in UIDS}
        harms = first <= window < first + len(gains)
        if harms:
            seen[1], found["uid_1"] = observation(1, **STRUCK[wrong]), gains[window - first]
        norm = 11.0 if harms and wrong == "outsized" else 1.0
        outcome = board.see(with_norm(evidence(window, seen, **found), 1, norm))
        assert (1 in outcome.struck) == harms
    assert [board.proven(uid) for uid in UIDS] == [gains != (-0.3, -0.3)] + [True] * (len(UIDS) - 1)


def test_harm_of_an_earlier_owner_of_the_uid_costs_the_present_one_nothing(observation, evidence) -> None:
    board = Board(HPARAMS.model_copy(update={"pay_windows": 20}))
    for window in range(12):
        earlier = observation(1, **WRONGS["another_model"]).model_copy(update={"hotkey": "earlier"})
        hides = earlier.model_copy(update={"assigned_pages": False})
        seen = {0: {1: hides}, 1: {1: earlier}, 2: {1: earlier}}.get(window, {})
        gains = {"uid_1": -0.3} if window in (1, 2) else {}
        board.see(evidence(window, good(observation) | seen, **gains))
    assert [board.proven(uid) for uid in UIDS] == [True] * len(UIDS)


@pytest.mark.parametrize("count", [5, 6])
def test_where_most_miners_break_a_rule_and_harm_nobody_loses_its_place_for_long(observation, evidence, count) -> None:
    """A validator whose own model differs takes all others for out of sync."""
    random, shock = np.random.default_rng(2), range(12, 15)
    board, found = Board(HPARAMS.model_copy(update={"pay_windows": 20})), []
    for window in range(shock[-1] + 2 + PROVING):
        away = {uid: observation(uid, **WRONGS["another_model"]) for uid in UIDS[:count] if window in shock}
        level = -0.1 if window in shock else 0.3
        gains = {f"uid_{uid}": level + 0.05 * random.normal() for uid in UIDS}
        board.see(evidence(window, good(observation) | away, **gains))
        found.append([board.proven(uid) for uid in UIDS])
    assert False in found[shock[-1]]
    assert found[-1] == [True] * len(UIDS)


def test_who_names_other_pages_in_an_applied_update_has_no_place_until_that_is_long_ago(observation, evidence) -> None:
    """Nobody measures such an update. On probation it is not applied, so it costs no place."""
    random, first, hiding = np.random.default_rng(2), 12, {"assigned_pages": False, "evaluation": None}
    board = Board(HPARAMS.model_copy(update={"pay_windows": 20}))
    newcomer, found = 9, []
    probation = {"listed": False, "included": False, "probation": True}
    for window in range(first + 21):
        seen = good(observation) | {newcomer: observation(newcomer, **probation)}
        if window == first:
            seen |= {1: observation(1, **hiding), newcomer: observation(newcomer, **probation, **hiding)}
        board.see(evidence(window, seen, **{f"uid_{uid}": 0.3 + 0.05 * random.normal() for uid in (*UIDS, newcomer)}))
        found.append(board.proven(1))
        if window >= first:
            assert [board.proven(uid) for uid in (*UIDS[1:], newcomer)] == [True] * len(UIDS)
    assert found[first - 1 :] == [True, *[False] * 20, True]


def test_it_has_none_either_while_it_is_too_new_to_be_judged(observation, evidence) -> None:
    board = Board(HPARAMS.model_copy(update={"pay_windows": 20}))
    board.see(evidence(0, {**good(observation), 1: observation(1, assigned_pages=False, evaluation=None)}))
    assert [board.proven(uid) for uid in UIDS] == [False] + [None] * (len(UIDS) - 1)


@pytest.mark.parametrize("pages", [False, None])
def test_where_no_applied_update_is_known_to_name_its_pages_nobody_loses_its_place(
    observation, evidence, pages: bool | None
) -> None:
    """Then the validator may have other data. Newcomers on probation do not count."""
    newcomer, elsewhere = 9, {"assigned_pages": False, "evaluation": None}
    board = Board(HPARAMS.model_copy(update={"pay_windows": 20}))
    for window in range(12):
        changed = {uid: observation(uid, **elsewhere) for uid in UIDS if window == 6}
        if changed:
            changed[6] = observation(6, assigned_pages=pages, evaluation=None)
        on_probation = {newcomer: observation(newcomer, listed=False, included=False, probation=True)}
        board.see(evidence(window, good(observation) | on_probation | changed))
    assert [board.proven(uid) for uid in (*UIDS, newcomer)] == [True] * (len(UIDS) + 1)


def test_a_window_in_which_everybody_harms_costs_nobody_its_place_for_long(observation, evidence) -> None:
    random, first, shock = np.random.default_rng(2), 12, range(12, 15)
    board, found = Board(HPARAMS.model_copy(update={"pay_windows": 20})), []
    for window in range(first + 10):
        level = -0.3 if window in shock else 0.3
        board.see(evidence(window, good(observation), **{f"uid_{uid}": level + 0.05 * random.normal() for uid in UIDS}))
        found.append([board.proven(uid) for uid in UIDS])
    assert found[shock[-1]] == [False] * len(UIDS)
    assert {*map(tuple, found[shock[-1] + PROVING :])} == {(True,) * len(UIDS)}


def test_newcomers_do_not_set_the_spread_by_which_harm_is_judged(observation, evidence) -> None:
    """Many on probation with tiny steps have tiny spreads, by which an honest miner's chance would be harm."""
    random, tiny = np.random.default_rng(3), range(10, 30)
    board = Board(HPARAMS.model_copy(update={"pay_windows": 20}))
    for window in range(20):
        seen = good(observation) | {uid: observation(uid, included=False, listed=False, probation=True) for uid in tiny}
        gains = {uid: 0.3 + 0.15 * random.normal() for uid in UIDS} | dict.fromkeys(tiny, 0.003)
        gains[1] = -0.1 if window in (8, 9) else gains[1]
        board.see(evidence(window, seen, **{f"uid_{uid}": gain for uid, gain in gains.items()}))
    assert [board.proven(uid) for uid in UIDS] == [True] * len(UIDS)


def shortened(evidence: Evidence, uids: Iterable[int], length: float) -> Evidence:
    """Return the evidence in which the steps of ``uids`` have this length, and their directions as before."""
    assert evidence.alignment is not None
    scale = np.array([length if uid in uids else 1.0 for uid in evidence.alignment.uids])
    gram = gram_of(evidence.alignment) * np.outer(scale, scale)
    changed = evidence.alignment.model_copy(
        update={
            "products": published(np.asarray(evidence.alignment.products) * scale),
            "gram": published(gram[np.triu_indices(len(scale))]),
        }
    )
    return evidence.model_copy(update={"alignment": changed})


@pytest.mark.parametrize("length", [9e-3, 1e-3, 7e-4, 1e-12])
def test_very_short_steps_in_a_good_direction_earn_no_place(observation, evidence, length: float) -> None:
    """Applied, such updates would only take places of others."""
    newcomer = range(10, 16)
    board = Board(HPARAMS.model_copy(update={"pay_windows": 20}))
    seen = good(observation) | {uid: observation(uid, included=False, listed=False, probation=True) for uid in newcomer}
    for window in range(10):
        board.see(shortened(evidence(window, seen), newcomer, length))
    assert [board.proven(uid) for uid in UIDS] == [True] * len(UIDS)
    assert [board.proven(uid) for uid in newcomer] == [False] * len(newcomer)


def test_who_fails_its_own_pages_tests_waits_and_leaves_after_eight(observation, evaluation, evidence) -> None:
    """Its gain is beyond chance, and the reason names the doubt. Without a test there is none."""
    elsewhere = observation(1, evaluation=evaluation(assigned=0.005, held_out=0.01))
    untested = observation(2, sampled=False, evaluation=None)
    board = Board(HPARAMS.model_copy(update={"pay_windows": 20}))
    found = []
    for window in range(DISPROVING_TESTS):
        board.see(evidence(window, {**good(observation), 1: elsewhere, 2: untested}))
        found.append(board.places[1])
        assert board.proven(2) == board.proven(3) == (True if window + 1 >= PROVING else None)
    assert [one.proven for one in found] == [None] * (DISPROVING_TESTS - 1) + [False]
    waits = "its own-pages factor is 0 after 7 tests: a listed miner stays, and others wait"
    assert found[-2].reason == waits


@pytest.mark.parametrize("wrong", ["too_late", "missing", "malformed"])
def test_who_sends_nothing_valid_on_probation_is_a_known_zero(wrong: str, observation, evidence) -> None:
    """Otherwise uids that cost nothing would draw turns on probation like newcomers that train."""
    board, newcomer = Board(HPARAMS.model_copy(update={"pay_windows": 20})), 7
    on_probation = {"listed": False, "included": False, "probation": True}
    sends = observation(newcomer, **on_probation)
    fails = observation(newcomer, **{**WRONGS[wrong], **on_probation})
    found = []
    for window in range(2 * PROVING):
        board.see(evidence(window, {**good(observation), newcomer: fails if window < PROVING else sends}))
        found.append(board.proven(newcomer))
    assert found[: PROVING - 1] == [None] * (PROVING - 1)
    assert found[PROVING - 1 : -1] == [False] * PROVING
    assert found[-1] is True  # it is judged by what it sends as soon as it can be


def test_many_on_probation_with_changing_lengths_deny_nobody_a_place(observation, evidence) -> None:
    """A cosine is rounded with the published numbers: very short steps would have far larger cosines than others."""
    random, many = np.random.default_rng(4), range(20, 36)
    board = Board(HPARAMS.model_copy(update={"pay_windows": 20}))
    newcomer = 7
    seen = good(observation)
    seen |= {uid: observation(uid, included=False, listed=False, probation=True) for uid in (newcomer, *many)}
    for window in range(10):
        gains = {f"uid_{uid}": 0.15 + 0.02 * random.normal() for uid in (*UIDS, newcomer)}
        gains |= {f"uid_{uid}": 0.15 for uid in many}
        board.see(shortened(evidence(window, seen, **gains), many, 1.0 if window % 2 else 7e-4))
    assert [board.proven(uid) for uid in (*UIDS, newcomer)] == [True] * (len(UIDS) + 1)


def test_who_harms_in_some_windows_and_is_late_in_between_loses_its_place_too(observation, evidence) -> None:
    random = np.random.default_rng(2)
    late = {**good(observation), 1: observation(1, **WRONGS["too_late"])}
    board = Board(HPARAMS.model_copy(update={"pay_windows": 20}))
    for window in range(12 + 2 * PROVING):
        gains = {f"uid_{uid}": 0.3 + 0.05 * random.normal() for uid in UIDS}
        harms = window >= 12
        seen = late if harms and window % 2 else good(observation)
        board.see(evidence(window, seen, **gains | ({"uid_1": -0.3} if harms else {})))
    assert board.proven(1) is False


def test_who_sends_too_seldom_to_be_judged_does_not_keep_its_place(observation, evidence) -> None:
    """It would be unknown for ever, and harm in the windows in which it sends."""
    board, pay_windows = Board(HPARAMS.model_copy(update={"pay_windows": 20})), 20
    late = {**good(observation), 1: observation(1, **WRONGS["too_late"])}
    found = []
    for window in range(60):
        honest, harms = window < 10, window >= 30 and window % 20 in (8, 9)
        seen = good(observation) if honest or harms else late
        board.see(evidence(window, seen, uid_1=0.3 if honest else -0.3))
        found.append(board.proven(1))
    assert found[10:25] == [True] * 15  # an outage of a miner that has proven itself
    assert True not in found[30:]
    assert None not in found[10 + pay_windows :]

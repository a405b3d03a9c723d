"""Rules strike who breaks them, and nobody can change them for others."""

from observed import HPARAMS, UIDS, WRONGS, good

from tplr.schemas import OUT_OF_SYNC, Evidence
from tplr.scoring.board import Board
from tplr.scoring.penalties import RULES


def with_norms(evidence: Evidence, norms: dict[int, float]) -> Evidence:
    assert evidence.alignment
    sent = tuple(norms.get(uid, 1.0) for uid in evidence.alignment.uids)
    return evidence.model_copy(update={"alignment": evidence.alignment.model_copy(update={"norms": sent})})


def test_honest_training_explains_the_norm_above_which_an_update_is_outsized(observation, evidence) -> None:
    """Neither giants nor tiny updates change it, included or not, however many there are."""

    def struck(included: int, norms: dict[int, float]) -> set[int]:
        listed = {uid: observation(uid) for uid in UIDS[:included]}
        waiting = {uid: observation(uid, listed=False, included=False, probation=True) for uid in UIDS[included:]}
        seen = with_norms(evidence(0, {**listed, **waiting}), norms)
        assert seen.alignment
        bounded = seen.alignment.model_copy(update={"largest_norm": 60.0})
        found = Board(HPARAMS).see(seen.model_copy(update={"alignment": bounded})).struck
        assert {*found.values()} <= {("outsized",)}
        return {*found}

    giants, tiny, large = (dict.fromkeys(UIDS[1:], norm) for norm in (61.0, 1e-3, 59.0))
    assert Board(HPARAMS).see(with_norms(evidence(0, good(observation)), giants)).struck == {}  # not measured
    for included in (0, 1, len(UIDS)):
        assert struck(included, giants) == {*UIDS[1:]}
        assert struck(included, {2: 61.0}) == {2}
        assert struck(included, tiny) == struck(included, large) == struck(included, {2: 59.0}) == set()


def test_who_is_away_breaks_no_rule(observation, evidence) -> None:
    """Its last report is old, or its commit came without an update; only a miner that sends from another model is
    struck."""
    away = {**good(observation), 1: observation(1, **{**WRONGS["missing"], "behind": OUT_OF_SYNC})}
    for wrong in ("no_commit", "hash_mismatch", "too_late"):
        away[2] = observation(2, **WRONGS[wrong])
        assert Board(HPARAMS).see(evidence(0, away)).struck == {}
    for wrong in ("another_model", "unread"):
        seen = {**good(observation), 1: observation(1, **WRONGS[wrong])}
        assert Board(HPARAMS).see(evidence(0, seen)).struck == {1: ("out_of_sync",)}


def test_every_rule_has_a_name_of_its_own() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)

"""Score reports without observations, except those that a test adds."""

from typing import Any

from tplr.schemas import ScoreReport

EMPTY: dict[str, Any] = {
    "uid": 0,
    "profile": "hardened",
    "held_out_pages": "",
    "faults": (),
    "observations": {},
    "alignment": None,
    "follows_from": (),
    "peer_scores": {},
    "struck": {},
    "weights": {},
    "weights_set": None,
}


def score_report(window: int, **changes: Any) -> ScoreReport:
    """Without a checksum: see ``ScoreReport.sealed``."""
    return ScoreReport.model_validate({"window": window} | EMPTY | changes)

"""The peer scores of a documented validator, and the function that updates them from a window's evidence."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tplr.errors import StateError
from tplr.hparams import HParams
from tplr.schemas import DocumentedScore, Evidence, PeerObservation, ScoreReport
from tplr.scoring.board import Outcome
from tplr.scoring.documented.measures import base_score, binary_indicator, moving_average, sync_score
from tplr.scoring.documented.penalties import BY_CODE, strike
from tplr.scoring.documented.rating import Rating, rate
from tplr.scoring.documented.selection import choose_evaluated
from tplr.scoring.measures import measured_gain
from tplr.scoring.weights import power_normalise

VERSION = 4


def step(
    peer_scores: Mapping[int, DocumentedScore],
    observations: Mapping[int, PeerObservation],
    window: int,
    hparams: HParams,
) -> tuple[dict[int, DocumentedScore], dict[int, tuple[str, ...]]]:
    """Return the peer scores after a window, and the rules that struck in it, by uid.

    This is a pure function; the order of its arguments' entries does not matter.

    Args:
        peer_scores: before the window.
        observations: of every registered uid. A uid that is missing, or has another hotkey, loses its scores.
    """
    before = {
        uid: peer_scores[uid]
        if uid in peer_scores and peer_scores[uid].hotkey == seen.hotkey
        else DocumentedScore(hotkey=seen.hotkey)
        for uid, seen in sorted(observations.items())
    }
    ratings = rate(
        {uid: Rating(peer_score.mu, peer_score.sigma) for uid, peer_score in before.items()},
        {uid: measured_gain(seen.evaluation) for uid, seen in observations.items() if seen.evaluation is not None},
        beta=hparams.documented_scores.openskill_beta,
        tau=hparams.documented_scores.openskill_tau,
    )
    after, struck = {}, {}
    for uid, seen in sorted(observations.items()):
        measured = _measure(before[uid], seen, window, hparams)
        if uid in ratings:
            measured = measured.model_copy(update=ratings[uid]._asdict())
        after[uid], struck[uid] = _punish(measured, seen, hparams)
    return after, {uid: codes for uid, codes in struck.items() if codes}


def _measure(peer_score: DocumentedScore, seen: PeerObservation, window: int, hparams: HParams) -> DocumentedScore:
    """Return the score with updated averages and counters, but without rating and penalties."""
    changed: dict[str, Any] = {"waiting": peer_score.waiting + 1}
    if seen.evaluation is not None:
        alpha = hparams.documented_scores.binary_score_ma_alpha
        changed = {
            "gradient_score": measured_gain(seen.evaluation),
            "binary": moving_average(peer_score.binary, binary_indicator(seen.evaluation), alpha),
            "evaluations": peer_score.evaluations + 1,
            "last_evaluated": window,
            "waiting": 1,
        }
    if seen.behind is not None:
        changed["sync"] = sync_score(seen.behind)
    if seen.active is not None:
        changed["inactive"] = 0 if seen.active else peer_score.inactive + 1
    return peer_score.model_copy(update=changed)


def _punish(
    peer_score: DocumentedScore, seen: PeerObservation, hparams: HParams
) -> tuple[DocumentedScore, tuple[str, ...]]:
    """Return the score with penalties, base and final score, and the codes of the rules that struck."""
    evaluated = seen.evaluation is not None
    multipliers, struck = strike(seen, peer_score, hparams, evaluated=evaluated)
    if peer_score.inactive >= hparams.documented_scores.reset_inactive_windows:
        return DocumentedScore(hotkey=peer_score.hotkey, inactive=peer_score.inactive), struck
    base = peer_score.base
    if evaluated:
        ordinal = Rating(peer_score.mu, peer_score.sigma).ordinal
        base = base_score(ordinal=ordinal, binary=peer_score.binary, sync=peer_score.sync)
    binary = peer_score.binary
    if binary > 0:
        binary *= math.prod(BY_CODE[code].factor for code in struck if BY_CODE[code].binary)
    # A factor would raise a negative base.
    final = base * math.prod(multipliers.values()) if base > 0 else base
    return peer_score.model_copy(
        update={"multipliers": multipliers, "base": base, "binary": binary, "final": final}
    ), struck


class DocumentedBoard:
    """Peer scores by uid, with their saved state; the interface of ``profiles.ScoreBoard``."""

    def __init__(self, hparams: HParams) -> None:
        self.hparams = hparams
        self.peer_scores: dict[int, DocumentedScore] = {}
        self.newest = -1
        self.follows_from: tuple[int, ...] = ()

    @property
    def finals(self) -> dict[int, float]:
        """Final scores by ascending uid."""
        return {uid: peer_score.final for uid, peer_score in sorted(self.peer_scores.items())}

    @property
    def weights(self) -> dict[int, float]:
        """Each miner's share of the pay, by ascending uid, without zeros."""
        return power_normalise(self.finals, self.hparams.power_normalisation)

    def proven(self, uid: int) -> bool:
        """Return whether a miner has a positive score."""
        return uid in self.peer_scores and self.peer_scores[uid].final > 0

    def sample(self, pool: Mapping[int, str], window: int, seed: int) -> tuple[int, ...]:
        """Return the uids to evaluate in ``window``, ascending."""
        return choose_evaluated(
            pool,
            self.finals,
            {uid: one.waiting for uid, one in self.peer_scores.items()},
            window=window,
            count=self.hparams.uids_per_window,
            bins=self.hparams.documented_scores.evaluation_bins,
            seed=seed,
        )

    def see(self, evidence: Evidence) -> Outcome:
        """Update the scores with a window's evidence."""
        observations = {int(uid): seen for uid, seen in evidence.observations.items()}
        self.peer_scores, struck = step(self.peer_scores, observations, evidence.window, self.hparams)
        self.follows_from = (self.newest,) if self.newest >= 0 else ()
        self.newest = evidence.window
        return Outcome(dict(self.peer_scores), struck)

    def resume(self, reports: Iterable[ScoreReport]) -> None:
        """Continue from the last of these reports."""
        for report in reports:
            self.peer_scores = {
                int(uid): one for uid, one in report.peer_scores.items() if isinstance(one, DocumentedScore)
            }
            self.follows_from, self.newest = report.follows_from, report.window

    def state_dict(self) -> dict[str, Any]:
        """Return ``version``, the last ``window``, and ``peer_scores`` by uid."""
        scores = {str(uid): one.model_dump(mode="json") for uid, one in sorted(self.peer_scores.items())}
        return {"version": VERSION, "window": self.newest, "peer_scores": scores}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Raises StateError for another version or shape; then nothing has changed."""
        if set(state) != {"version", "window", "peer_scores"} or state["version"] != VERSION:
            raise StateError(f"scores: expected version {VERSION} with peer scores, got {sorted(state)}")
        try:
            peer_scores = {
                int(uid): DocumentedScore.model_validate_json(json.dumps(one))
                for uid, one in state["peer_scores"].items()
            }
            self.newest = int(state["window"])
        except (TypeError, ValueError, AttributeError) as error:
            raise StateError(f"scores: malformed peer score: {error}") from error
        self.peer_scores = peer_scores

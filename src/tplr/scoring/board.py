"""The peer scores that a validator keeps, and the pure function that updates them from a window's observations."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tplr.errors import StateError
from tplr.hparams import HParams
from tplr.schemas import PeerObservation, PeerScore
from tplr.scoring.measures import (
    base_score,
    binary_indicator,
    gain,
    gradient_score,
    gradient_sign,
    moving_average,
    sync_score,
)
from tplr.scoring.penalties import REMEMBERED_SIGNS, RULES, refused, strike
from tplr.scoring.rating import Rating, rate
from tplr.scoring.weights import power_normalise
from tplr.seeds import Profile

VERSION = 3
# Initial binary average in the hardened profile, as after seven good evaluations: one lost or unlucky window among a
# newcomer's first ones costs little. It fades with every evaluation, and before the first one nothing is earned.
FIRST_BINARY = 0.3


@dataclass(frozen=True)
class Outcome:
    """Peer scores after a window and the rules that struck in it, by uid."""

    peer_scores: dict[int, PeerScore]
    struck: dict[int, tuple[str, ...]]


def step(
    peer_scores: Mapping[int, PeerScore], observations: Mapping[int, PeerObservation], window: int, hparams: HParams
) -> Outcome:
    """Peer scores after a window. A pure function; the order of its arguments' entries does not matter.

    Args:
        peer_scores: before the window.
        observations: of every registered uid. A uid that is missing, or has another hotkey, loses its scores.
    """
    before = {
        uid: peer_scores[uid]
        if uid in peer_scores and peer_scores[uid].hotkey == seen.hotkey
        else PeerScore(hotkey=seen.hotkey, binary=FIRST_BINARY if hparams.profile == "hardened" else 0.0)
        for uid, seen in sorted(observations.items())
    }
    played = _match(observations, hparams.profile)
    ratings = rate(
        {uid: Rating(peer_score.mu, peer_score.sigma) for uid, peer_score in before.items()},
        played,
        beta=hparams.openskill_beta,
        tau=hparams.openskill_tau,
    )
    after, struck = {}, {}
    for uid, seen in sorted(observations.items()):
        measured = _measure(before[uid], seen, played.values(), window, hparams)
        if uid in ratings:
            measured = measured.model_copy(update=ratings[uid]._asdict())
        after[uid], struck[uid] = _punish(measured, seen, hparams, evaluated=seen.evaluation is not None)
    return Outcome(after, {uid: codes for uid, codes in struck.items() if codes})


def weights(peer_scores: Mapping[int, PeerScore], hparams: HParams) -> dict[int, float]:
    """Each miner's share of the pay, by ascending uid, without zeros."""
    return power_normalise(
        {uid: peer_score.final for uid, peer_score in peer_scores.items()}, hparams.power_normalisation
    )


def _match(observations: Mapping[int, PeerObservation], profile: Profile) -> dict[int, float]:
    """Scores of this window's match by uid: gradient scores; hardened, refused updates share the last rank."""
    played = {}
    for uid, seen in observations.items():
        if seen.evaluation is not None:
            played[uid] = gradient_score(seen.evaluation)
        elif refused(seen) and profile == "hardened":
            played[uid] = -math.inf
    return played


def _measure(
    peer_score: PeerScore, seen: PeerObservation, match: Iterable[float], window: int, hparams: HParams
) -> PeerScore:
    """Averages and counters after this window, whose match had these scores; neither rating nor penalties."""
    profile = hparams.profile
    changed: dict[str, Any] = {"waiting": peer_score.waiting + 1}
    if seen.evaluation is not None or (refused(seen) and profile == "hardened"):
        if seen.evaluation is not None:
            score, sign = gradient_score(seen.evaluation), gradient_sign(profile, seen.evaluation)
            near, binary = gain(score, match), binary_indicator(profile, seen.evaluation)
        else:
            # A refused update counts as the worst one: otherwise withholding a bad update would pay.
            score, sign, near, binary = -1.0, -1, 0.0, -1.0
        # The mean, until there are as many evaluations as the moving average remembers.
        rate = max(hparams.binary_score_ma_alpha, 1 / (peer_score.evaluations + 1))
        changed = {
            "gradient_score": score,
            "gain": moving_average(peer_score.gain, near, rate),
            "binary": moving_average(peer_score.binary, binary, hparams.binary_score_ma_alpha),
            "signs": (*peer_score.signs, sign)[-REMEMBERED_SIGNS:],
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
    peer_score: PeerScore, seen: PeerObservation, hparams: HParams, *, evaluated: bool
) -> tuple[PeerScore, tuple[str, ...]]:
    """The score with penalties, base and final score, and the codes of the rules that struck."""
    profile = hparams.profile
    multipliers, struck = strike(profile, seen, peer_score, hparams, evaluated=evaluated)
    if peer_score.inactive >= hparams.reset_inactive_windows:
        return _forgotten(peer_score, multipliers, profile), struck
    base = peer_score.base
    if profile == "hardened" or evaluated:
        base = base_score(
            profile,
            ordinal=Rating(peer_score.mu, peer_score.sigma).ordinal,
            gain=peer_score.gain,
            binary=peer_score.binary if peer_score.evaluations else 0.0,
            sync=peer_score.sync,
            beta=hparams.openskill_beta,
        )
    binary = peer_score.binary
    if profile == "documented":
        for one in RULES:
            if one.documented_binary and one.documented is not None and one.code in struck and binary > 0:
                binary *= one.documented
    # A factor would raise a negative base.
    final = base * math.prod(multipliers.values()) if base > 0 else base
    return peer_score.model_copy(
        update={"multipliers": multipliers, "base": base, "binary": binary, "final": final}
    ), struck


def _forgotten(peer_score: PeerScore, multipliers: dict[str, float], profile: Profile) -> PeerScore:
    """The score of an inactive miner without its earnings. Hardened, penalties stay: absence must not pay them off."""
    fresh = PeerScore(hotkey=peer_score.hotkey, inactive=peer_score.inactive)
    if profile == "documented":
        return fresh
    rating = min(Rating(), Rating(peer_score.mu, peer_score.sigma), key=lambda one: one.ordinal)
    owed = {"binary": min(fresh.binary, peer_score.binary), "signs": peer_score.signs, "multipliers": multipliers}
    return fresh.model_copy(update={**rating._asdict(), **owed})


class ScoreBoard:
    """Peer scores by uid, with their saved state."""

    def __init__(self, hparams: HParams) -> None:
        self.hparams = hparams
        self.peer_scores: dict[int, PeerScore] = {}

    @property
    def finals(self) -> dict[int, float]:
        """Final scores by ascending uid."""
        return {uid: peer_score.final for uid, peer_score in sorted(self.peer_scores.items())}

    @property
    def weights(self) -> dict[int, float]:
        """``weights`` of the present peer scores."""
        return weights(self.peer_scores, self.hparams)

    def see(self, observations: Mapping[int, PeerObservation], window: int) -> Outcome:
        """Take the step of a window."""
        outcome = step(self.peer_scores, observations, window, self.hparams)
        self.peer_scores = outcome.peer_scores
        return outcome

    def state_dict(self) -> dict[str, Any]:
        """``version``, and the peer scores by uid under ``standings``."""
        return {
            "version": VERSION,
            "standings": {str(uid): one.model_dump(mode="json") for uid, one in sorted(self.peer_scores.items())},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state. Raises StateError for another version or shape; then nothing has changed."""
        if set(state) != {"version", "standings"} or state["version"] != VERSION:
            raise StateError(f"scores: expected version {VERSION} with peer scores, got {sorted(state)}")
        try:
            self.peer_scores = {
                int(uid): PeerScore.model_validate({**entry, "signs": tuple(entry["signs"])})
                for uid, entry in state["standings"].items()
            }
        except (TypeError, ValueError, AttributeError, KeyError, ValidationError) as error:
            raise StateError(f"scores: malformed peer score: {error}") from error

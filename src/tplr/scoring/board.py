"""The standings a validator keeps, and the one step that moves them: a window's sightings in, new standings out."""

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
from tplr.scoring.penalties import REMEMBERED_SIGNS, RULES, PenaltyLimits, refused, strike
from tplr.scoring.rating import Rating, rate
from tplr.scoring.weights import power_normalise
from tplr.seeds import Profile

VERSION = 3
# Binary average that a miner begins with in the hardened profile, as of seven good evaluations: who loses a window, or
# is unlucky, among its first ones earns little less than others. It fades with every evaluation, and before the first
# one nothing is earned.
FIRST_BINARY = 0.3


@dataclass(frozen=True)
class Constants:
    """What the scores of a run are computed with."""

    profile: Profile
    beta: float
    tau: float
    alpha: float
    power: float
    limits: PenaltyLimits

    @classmethod
    def of(cls, hparams: HParams) -> "Constants":
        """Those of ``hparams``."""
        return cls(
            profile=hparams.profile,
            beta=hparams.openskill_beta,
            tau=hparams.openskill_tau,
            alpha=hparams.binary_score_ma_alpha,
            power=hparams.power_normalisation,
            limits=PenaltyLimits(hparams.sync_max_steps_behind, hparams.reset_inactive_windows),
        )


@dataclass(frozen=True)
class Outcome:
    """Standings by uid after a window, and by uid which rules struck in it."""

    peer_scores: dict[int, PeerScore]
    struck: dict[int, tuple[str, ...]]


def step(
    peer_scores: Mapping[int, PeerScore], observations: Mapping[int, PeerObservation], window: int, constants: Constants
) -> Outcome:
    """What a window changes; a pure function, and none of its arguments' order matters.

    ``observations`` holds everybody who is registered: who is not in it, or has another hotkey, is forgotten.
    """
    before = {
        uid: peer_scores[uid]
        if uid in peer_scores and peer_scores[uid].hotkey == seen.hotkey
        else PeerScore(hotkey=seen.hotkey, binary=FIRST_BINARY if constants.profile == "hardened" else 0.0)
        for uid, seen in sorted(observations.items())
    }
    played = _match(observations, constants.profile)
    ratings = rate(
        {uid: Rating(peer_score.mu, peer_score.sigma) for uid, peer_score in before.items()},
        played,
        beta=constants.beta,
        tau=constants.tau,
    )
    after, struck = {}, {}
    for uid, seen in sorted(observations.items()):
        measured = _measure(before[uid], seen, played.values(), window, constants)
        if uid in ratings:
            measured = measured.model_copy(update=ratings[uid]._asdict())
        after[uid], struck[uid] = _punish(measured, seen, constants, evaluated=seen.evaluation is not None)
    return Outcome(after, {uid: codes for uid, codes in struck.items() if codes})


def weights(peer_scores: Mapping[int, PeerScore], constants: Constants) -> dict[int, float]:
    """What each miner is to be paid, as a share; by ascending uid, without zeros."""
    return power_normalise({uid: peer_score.final for uid, peer_score in peer_scores.items()}, constants.power)


def _match(observations: Mapping[int, PeerObservation], profile: Profile) -> dict[int, float]:
    """Who plays this window's match, by what: gradient scores; hardened, who was refused shares the last rank."""
    played = {}
    for uid, seen in observations.items():
        if seen.evaluation is not None:
            played[uid] = gradient_score(seen.evaluation)
        elif refused(seen) and profile == "hardened":
            played[uid] = -math.inf
    return played


def _measure(
    peer_score: PeerScore, seen: PeerObservation, match: Iterable[float], window: int, constants: Constants
) -> PeerScore:
    """Averages and memories after this window, whose match had these scores; neither rating nor penalties."""
    profile = constants.profile
    changed: dict[str, Any] = {"waiting": peer_score.waiting + 1}
    # The mean, until there are as many as a moving average remembers.
    rate = max(constants.alpha, 1 / (peer_score.evaluations + 1))
    if seen.evaluation is not None:
        sign, binary = gradient_sign(profile, seen.evaluation), binary_indicator(profile, seen.evaluation)
        score = gradient_score(seen.evaluation)
        changed |= {
            "gradient_score": score,
            "gain": moving_average(peer_score.gain, gain(score, match), rate),
            "evaluations": peer_score.evaluations + 1,
            "last_evaluated": window,
            "waiting": 1,
        }
    elif refused(seen) and profile == "hardened":
        # As bad as the worst update: otherwise a bad one would better be withheld.
        sign, binary = -1, -1.0
        changed |= {
            "gradient_score": -1.0,
            "gain": moving_average(peer_score.gain, 0.0, rate),
            "evaluations": peer_score.evaluations + 1,
            "last_evaluated": window,
            "waiting": 1,
        }
    else:
        sign = binary = None
    if sign is not None and binary is not None:
        changed |= {
            "signs": (*peer_score.signs, sign)[-REMEMBERED_SIGNS:],
            "binary": moving_average(peer_score.binary, binary, constants.alpha),
        }
    if seen.behind is not None:
        changed["sync"] = sync_score(seen.behind)
    if seen.active is not None:
        changed["inactive"] = 0 if seen.active else peer_score.inactive + 1
    return peer_score.model_copy(update=changed)


def _punish(
    peer_score: PeerScore, seen: PeerObservation, constants: Constants, *, evaluated: bool
) -> tuple[PeerScore, tuple[str, ...]]:
    profile, limits = constants.profile, constants.limits
    multipliers, struck = strike(profile, seen, peer_score, limits, evaluated=evaluated)
    if peer_score.inactive >= limits.reset_inactive_windows:
        return _forgotten(peer_score, multipliers, profile), struck
    base = peer_score.base
    if profile == "hardened" or evaluated:
        base = base_score(
            profile,
            ordinal=Rating(peer_score.mu, peer_score.sigma).ordinal,
            gain=peer_score.gain,
            binary=peer_score.binary if peer_score.evaluations else 0.0,
            sync=peer_score.sync,
            beta=constants.beta,
        )
    binary = peer_score.binary
    if profile == "documented":
        for one in RULES:
            if one.documented_binary and one.documented is not None and one.code in struck and binary > 0:
                binary *= one.documented
    # A negative base is left alone: a factor would raise it.
    final = base * math.prod(multipliers.values()) if base > 0 else base
    return peer_score.model_copy(
        update={"multipliers": multipliers, "base": base, "binary": binary, "final": final}
    ), struck


def _forgotten(peer_score: PeerScore, multipliers: dict[str, float], profile: Profile) -> PeerScore:
    """Without all it had earned. Hardened, what it owes stays: else being away would pay off penalties."""
    fresh = PeerScore(hotkey=peer_score.hotkey, inactive=peer_score.inactive)
    if profile == "documented":
        return fresh
    rating = min(Rating(), Rating(peer_score.mu, peer_score.sigma), key=lambda one: one.ordinal)
    owed = {"binary": min(fresh.binary, peer_score.binary), "signs": peer_score.signs, "multipliers": multipliers}
    return fresh.model_copy(update={**rating._asdict(), **owed})


class ScoreBoard:
    """Standings by uid, saved and restored whole."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.peer_scores: dict[int, PeerScore] = {}

    @property
    def finals(self) -> dict[int, float]:
        """Final score by ascending uid."""
        return {uid: peer_score.final for uid, peer_score in sorted(self.peer_scores.items())}

    @property
    def weights(self) -> dict[int, float]:
        """As ``weights``, of the present standings."""
        return weights(self.peer_scores, self.constants)

    def see(self, observations: Mapping[int, PeerObservation], window: int) -> Outcome:
        """Take a step; returns what came of it."""
        outcome = step(self.peer_scores, observations, window, self.constants)
        self.peer_scores = outcome.peer_scores
        return outcome

    def state_dict(self) -> dict[str, Any]:
        """A fresh plain structure."""
        return {
            "version": VERSION,
            "standings": {str(uid): one.model_dump(mode="json") for uid, one in sorted(self.peer_scores.items())},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; StateError if it is of another version or shape, and nothing has changed."""
        if set(state) != {"version", "standings"} or state["version"] != VERSION:
            raise StateError(f"scores: expected version {VERSION} with standings, got {sorted(state)}")
        try:
            self.peer_scores = {
                int(uid): PeerScore.model_validate({**entry, "signs": tuple(entry["signs"])})
                for uid, entry in state["standings"].items()
            }
        except (TypeError, ValueError, AttributeError, KeyError, ValidationError) as error:
            raise StateError(f"scores: malformed standing: {error}") from error

"""Computes scores from the evidence of the last windows: a pure function, and the board that keeps this evidence.

    final = credit * own_pages * calibration        weight = presence * (final / presence)**power / sum

Older evidence does not count, and no score is carried over from one window to the next. A window counts for a uid if
the included set contains its update, and no rule of ``penalties.py`` struck. In all other windows it earned zero,
regardless of the reason. A window is blank only if the included set contains the update and this validator could not
measure it.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tplr.errors import StateError
from tplr.hparams import HParams
from tplr.schemas import (
    DocumentedScore,
    Evidence,
    PeerObservation,
    PeerScore,
    ScoreReport,
)
from tplr.scoring.calibration import Calibration, by_gradient, by_length, by_loss
from tplr.scoring.credit import Credit, credit, even_scales, means_and_errors
from tplr.scoring.measured_window import MeasuredWindow
from tplr.scoring.measures import loss_indicator, own_pages_factor
from tplr.scoring.overshoot import middles
from tplr.scoring.own_pages import FEWEST_OTHER_PAGES, indicator
from tplr.scoring.places import Place, places
from tplr.scoring.selection import sample_evaluated
from tplr.scoring.weights import power_normalise

VERSION = 4
# Steps of the ``own_pages`` factor, from the least positive one.
TRUST = (math.ulp(0.0), 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Outcome:
    """Peer scores after a window, and the rules that struck in it, by uid."""

    peer_scores: Mapping[int, PeerScore | DocumentedScore]
    struck: dict[int, tuple[str, ...]]


@dataclass(frozen=True)
class CreditShares:
    """The computation of credits and calibrations from the evidence of some windows.

    Attributes:
        credits: by uid, without miners whose ``own_pages`` factor is 0, which do not take part in the sharing.
        steps: ``trust_step`` of every miner, by uid.
        scale: factor of the last window's gains, so that all windows count equally.
        calibrations: of every miner, by uid.
        places: of every miner, by uid.
        indicators: of every miner's own-pages tests, by uid; those by loss if there are no others.
    """

    credits: Mapping[int, Credit]
    steps: Mapping[int, int]
    scale: float
    calibrations: Mapping[int, Calibration]
    places: Mapping[int, Place] = field(default_factory=dict)
    indicators: Mapping[int, Sequence[float]] = field(default_factory=dict)


class _Factors(NamedTuple):
    """The factors of the final scores of the last window's miners, and their own-pages tests; see ``CreditShares``."""

    credits: dict[int, Credit]
    own_pages: dict[int, float]
    calibrations: dict[int, Calibration]
    indicators: dict[int, list[float]]


def loss_test(seen: PeerObservation) -> float | None:
    """Return ``loss_indicator`` if the uid's losses were also measured on its assigned pages; else None."""
    measured = seen.evaluation
    return loss_indicator(measured.assigned, measured.held_out) if measured and measured.assigned else None


def trust_step(own_pages: float) -> int:
    """Return the level of trust for this ``own_pages`` factor, from 0 to ``len(TRUST)``."""
    return bisect_right(TRUST, own_pages)


def credit_shares(
    windows: Sequence[MeasuredWindow], peer_scores: Mapping[int, PeerScore], probation_windows: int
) -> CreditShares:
    """Return the computation of the credits of ``scores(windows)``, for at least one window.

    Args:
        peer_scores: as published, by which miners are judged.
        probation_windows: of hparams.
    """
    factors = _factors(windows)
    return CreditShares(
        credits=factors.credits,
        steps={uid: trust_step(one) for uid, one in factors.own_pages.items()},
        scale=float(_scales(windows)[-1]),
        calibrations=factors.calibrations,
        places=places(windows, peer_scores, probation_windows),
        indicators=factors.indicators,
    )


def scores(windows: Sequence[MeasuredWindow]) -> dict[int, PeerScore]:
    """Return the scores of the miners observed in the last of these windows (ascending); none without a window."""
    if not windows:
        return {}
    hotkeys = windows[-1].hotkeys
    shares, own_pages, calibration, indicators = _factors(windows)
    merits = _shared(windows, hotkeys, own_pages, MeasuredWindow.would_count)
    cosines = np.array([[one.cosine(*miner) for miner in hotkeys.items()] for one in windows], dtype=np.float64)
    presence = {uid: _presence(windows, uid, hotkey) for uid, hotkey in hotkeys.items()}
    means, errors = means_and_errors(cosines, np.array([*presence.values()]) > 0)
    peer_scores = {}
    for i, (uid, hotkey) in enumerate(hotkeys.items()):
        trust = own_pages[uid] * calibration[uid].value
        peer_scores[uid] = PeerScore(
            hotkey=hotkey,
            measured=int(np.isfinite(cosines[:, i]).sum()),
            mean=float(means[i]),
            error=float(errors[i]),
            presence=presence[uid],
            credit=shares[uid].value if uid in shares else 0.0,
            merit=merits[uid].value * trust if uid in merits else 0.0,
            tests=len(indicators[uid]),
            own_pages=own_pages[uid],
            calibration=calibration[uid].value,
            final=shares[uid].value * trust if uid in shares else 0.0,
        )
    return peer_scores


def _factors(windows: Sequence[MeasuredWindow]) -> _Factors:
    hotkeys = windows[-1].hotkeys
    tests = {uid: _own_pages_tests(windows, uid, hotkey) for uid, hotkey in hotkeys.items()}
    own_pages = {uid: own_pages_factor(found, by_loss) for uid, (found, by_loss) in tests.items()}
    shares = _shared(windows, hotkeys, own_pages, MeasuredWindow.counts)
    return _Factors(
        credits=shares,
        own_pages=own_pages,
        calibrations=_calibrations(windows, hotkeys, _trusted(shares, own_pages)),
        indicators={uid: found or by_loss for uid, (found, by_loss) in tests.items()},
    )


def _shared(
    windows: Sequence[MeasuredWindow],
    hotkeys: Mapping[int, str],
    own_pages: Mapping[int, float],
    counts: Callable[[MeasuredWindow, int, str], bool | None],
) -> dict[int, Credit]:
    """Credits by uid of those with a positive ``own_pages`` factor.

    A miner that did not train on its own pages takes nothing from the miners whose work it repeats: it shares credit
    with miners at its own level of trust (``TRUST``), after the more trusted ones have received theirs.
    """
    found: dict[int, Credit] = {}
    scales, steps = _scales(windows), {uid: trust_step(one) for uid, one in own_pages.items()}
    for step in range(1, len(TRUST) + 1):
        uids = {uid: hotkey for uid, hotkey in hotkeys.items() if steps[uid] >= step}
        counted = [{uid: counts(one, uid, hotkey) for uid, hotkey in uids.items()} for one in windows]
        more = [uid for uid in uids if steps[uid] > step]
        found |= credit([one.measured for one in windows], counted, first=more, scales=scales)
    return found


def _scales(windows: Sequence[MeasuredWindow]) -> np.ndarray:
    return even_scales([one.included_gains for one in windows])


def _own_pages_tests(windows: Sequence[MeasuredWindow], uid: int, hotkey: str) -> tuple[list[float], list[float]]:
    """Return the indicators of the own-pages tests, and the indicators by loss.

    A test that is missing by the validator's own fault counts 0, as one on other pages in the mean: otherwise a
    validator could leave out those that a miner does not pass.
    """
    found = [one.deviations(uid, hotkey) for one in windows]
    on_others = [ahead for one in found for page, ahead in one.items() if page != uid]
    tests: list[float] = []
    if len(on_others) >= FEWEST_OTHER_PAGES:
        tests += [indicator(one[uid], on_others) for one in found if uid in one]
        tests += [0.0 for one in windows if one.misses_test(uid, hotkey)]
    by_loss = [loss_test(seen) for one in windows if (seen := one.seen(uid, hotkey))]
    return tests, [one for one in by_loss if one is not None]


def _trusted(shares: Mapping[int, Credit], own_pages: Mapping[int, float]) -> dict[int, float]:
    """Return credit times the own-pages factor by uid."""
    return {uid: shares[uid].value * factor if uid in shares else 0.0 for uid, factor in own_pages.items()}


def _calibrations(
    windows: Sequence[MeasuredWindow], hotkeys: Mapping[int, str], trusted: Mapping[int, float]
) -> dict[int, Calibration]:
    miners = [*hotkeys.items()]
    updates = {uid: [found for one in windows if (found := one.evaluated(uid, key))] for uid, key in miners}
    pairs = np.array([[one.held_out_and_gain(*miner) for miner in miners] for one in windows])
    scales = _scales(windows)[:, None]
    held_out, gains = np.moveaxis(pairs.reshape(len(windows), len(miners), 2), 2, 0) * scales
    lengths = np.array([[one.length(uid) for uid in hotkeys] for one in windows])
    counted = np.array([[bool(one.counts(*miner)) for miner in miners] for one in windows], dtype=bool)
    loss = by_loss(updates)
    gradient = by_gradient(held_out, gains, lengths * scales, counted).tolist()
    length: list[float | None] = [None] * len(miners)
    if windows[-1].chosen_lengths:
        weights = np.array([trusted[uid] for uid in hotkeys])
        length = by_length(gains, lengths, scales=scales, included=counted, weights=weights).tolist()
    middle = middles(windows, hotkeys)
    return {
        uid: Calibration(loss[uid], first, middle[uid].factor, second)
        for uid, first, second in zip(hotkeys, gradient, length, strict=True)
    }


def _presence(windows: Sequence[MeasuredWindow], uid: int, hotkey: str) -> float:
    counted = [found for one in windows if (found := one.counts(uid, hotkey)) is not None]
    return sum(counted) / len(counted) if counted else 0.0


def pay(score: PeerScore, power: float) -> float:
    """Return ``presence * (final / presence)**power``, before division by the sum over all miners.

    The power applies to the score per window, not to presence: half of the windows earn half of the pay.
    """
    return score.presence * (score.final / score.presence) ** power if score.presence > 0 else 0.0


class Board:
    """The evidence of the last ``pay_windows`` windows, and the scores that follow from it.

    Attributes:
        peer_scores: by uid, of the last window.
        places: judgements of the same miners, by uid.
    """

    def __init__(self, hparams: HParams) -> None:
        self.hparams = hparams
        self._continue_from(())

    def _continue_from(self, windows: tuple[MeasuredWindow, ...]) -> None:
        peer_scores = scores(windows)
        judged = places(windows, peer_scores, self.hparams.probation_windows)
        # Only now, so that an error leaves the board as it was.
        self._windows, self.peer_scores, self.places = windows, peer_scores, judged

    @property
    def finals(self) -> dict[int, float]:
        """Final scores by ascending uid."""
        return {uid: one.final for uid, one in sorted(self.peer_scores.items())}

    @property
    def weights(self) -> dict[int, float]:
        """Each miner's share of the pay, by ascending uid, without zeros."""
        raised = {uid: pay(one, self.hparams.power_normalisation) for uid, one in self.peer_scores.items()}
        return power_normalise(raised, 1.0)

    @property
    def follows_from(self) -> tuple[int, ...]:
        """Windows of the earlier reports that determine the current scores."""
        return tuple(one.window for one in self._windows[:-1])

    @property
    def newest(self) -> int:
        """The last window that it has seen; -1 before the first."""
        return self._windows[-1].window if self._windows else -1

    def proven(self, uid: int) -> bool | None:
        """Return ``proven`` of the uid's place; None without a score."""
        return self.places[uid].proven if uid in self.places else None

    def sample(self, pool: Mapping[int, str], window: int, seed: int) -> tuple[int, ...]:
        """Return the uids to evaluate in ``window``, ascending: ``uids_per_window`` of the pool (hotkeys by uid)."""
        # Only windows that will be in ``follows_from`` of this window's report: an audit reads no others.
        windows = [one for one in self._windows if one.window > window - self.hparams.pay_windows]
        waited = {uid: self._waited(windows, uid, hotkey, window) for uid, hotkey in pool.items()}
        return sample_evaluated(waited, count=self.hparams.uids_per_window, seed=seed)

    def _waited(self, windows: Sequence[MeasuredWindow], uid: int, hotkey: str, window: int) -> int:
        """Return the windows since it was last sampled in ``windows``; ``pay_windows`` if it was not."""
        for one in reversed(windows):
            seen = one.seen(uid, hotkey)
            if seen is not None and seen.sampled:
                return window - one.window
        return self.hparams.pay_windows

    def see(self, evidence: Evidence) -> Outcome:
        """Add a window's evidence, drop evidence that is too old, and compute scores."""
        oldest = evidence.window - self.hparams.pay_windows + 1
        kept = (one for one in self._windows if oldest <= one.window < evidence.window)
        self._continue_from((*kept, MeasuredWindow(evidence, self.hparams)))
        return Outcome(dict(self.peer_scores), self._windows[-1].struck)

    def resume(self, reports: Iterable[ScoreReport]) -> None:
        """Continue from earlier reports (ascending), as from a saved state."""
        self._continue_from(tuple(MeasuredWindow(one.evidence, self.hparams) for one in reports))

    def state_dict(self) -> dict[str, Any]:
        """Return ``version``, and the ``evidence`` of the last windows."""
        return {"version": VERSION, "evidence": [one.evidence.model_dump(mode="json") for one in self._windows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Raises StateError for another version or shape; then nothing has changed."""
        if set(state) != {"version", "evidence"} or state["version"] != VERSION:
            raise StateError(f"scores: expected version {VERSION} with evidence, got {sorted(state)}")
        try:
            evidence = (Evidence.model_validate_json(json.dumps(one)) for one in state["evidence"])
            self._continue_from(tuple(MeasuredWindow(one, self.hparams) for one in evidence))
        except (TypeError, ValueError) as error:
            raise StateError(f"scores: malformed evidence: {error}") from error

"""Computes scores from the evidence of the last windows: a pure function, and the board that keeps this evidence.

    final = credit * own_pages * calibration        weight = presence * (final / presence)**power / sum

Older evidence does not count, and no score is carried over from one window to the next. A window counts for a uid if
the included set contains its update, and no rule of ``penalties.py`` struck. In all other windows it earned zero,
regardless of the reason. A window is blank only if the included set contains the update and this validator could not
measure it.
"""

import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tplr.errors import StateError
from tplr.hparams import HParams
from tplr.schemas import (
    VALID,
    Alignment,
    DocumentedScore,
    Evidence,
    PeerObservation,
    PeerScore,
    ScoreReport,
)
from tplr.scoring.calibration import Calibration, EvaluatedUpdate, by_gradient, by_loss
from tplr.scoring.credit import CHANCE, SHORTEST, Credit, credit, even_scales, gram_of, means_and_errors
from tplr.scoring.gain import own_pages_products, predicted_gains, predicting_tests
from tplr.scoring.measures import loss_indicator, own_pages_factor
from tplr.scoring.own_pages import FEWEST_OTHER_PAGES, deviations, indicator
from tplr.scoring.penalties import strikes
from tplr.scoring.selection import sample_evaluated
from tplr.scoring.weights import power_normalise

VERSION = 4
# Fewest measured windows after which a mean predicted gain beyond chance proves a miner: one window has no spread.
PROVING_WINDOWS = 2
# A mean predicted gain above this many standard errors proves a miner. It is higher than ``CHANCE``, because every
# window is a new chance for miners that send noise to exceed ``CHANCE``. Below ``CHANCE`` a miner is a known zero; in
# between, a listed miner keeps its place.
PROVEN = 4.0
# Number of own-pages tests after which a factor of 0 means that a miner does not train on its own pages, and number of
# measured windows after which harm on held-out pages counts.
DISPROVING_TESTS = 8
# A miner's spread by which harm is judged is at most this many times the usual one.
MOST_SPREAD = 2.0
# Steps of the ``own_pages`` factor, from the least positive one.
TRUST = (math.ulp(0.0), 0.25, 0.5, 1.0)
NOTHING = Alignment(uids=(), products=(), norms=(), gram=())


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
    """

    credits: Mapping[int, Credit]
    steps: Mapping[int, int]
    scale: float
    calibrations: Mapping[int, Calibration]


class MeasuredWindow:
    """One window's evidence by integer uid, and the values that follow from it alone.

    Attributes:
        gains: predicted gain of each measured update, by uid.
        measured: the window's alignment with these gains as products.
    """

    def __init__(self, evidence: Evidence, hparams: HParams) -> None:
        self.evidence = evidence
        self.window = evidence.window
        self.struck = strikes(evidence, max_behind=hparams.sync_max_steps_behind)
        alignment = evidence.alignment or NOTHING
        self._held_out = dict(zip(alignment.uids, alignment.products, strict=True))
        self.gains = predicted_gains(alignment, predicting_tests(evidence))
        self.measured = alignment.model_copy(update={"products": tuple(self.gains.values())})
        self._lengths = dict(zip(alignment.uids, np.sqrt(np.diag(gram_of(alignment))).tolist(), strict=True))
        self.included_gains = [
            self.gains[int(uid)]
            for uid, seen in evidence.observations.items()
            if seen.included and int(uid) in self.gains and int(uid) not in self.struck
        ]
        self._seen = {int(uid): seen for uid, seen in evidence.observations.items()}
        self.hotkeys = {uid: self._seen[uid].hotkey for uid in sorted(self._seen)}
        self._deviations: dict[int, dict[int, float]] = {}
        for (uid, page), one in own_pages_tests(evidence).items():
            self._deviations.setdefault(uid, {})[page] = one

    def seen(self, uid: int, hotkey: str) -> PeerObservation | None:
        """Return the observation of a uid; None if it was absent or had another hotkey."""
        found = self._seen.get(uid)
        return found if found is not None and found.hotkey == hotkey else None

    def counts(self, uid: int, hotkey: str) -> bool | None:
        """Return whether the window counts for a uid; None if it is blank."""
        seen = self.seen(uid, hotkey)
        if seen is None or not seen.included or uid in self.struck:
            return False
        return True if uid in self.gains else None

    def would_count(self, uid: int, hotkey: str) -> bool | None:
        """Return ``counts`` as if every measured update had been included; None if the update was not requested."""
        seen = self.seen(uid, hotkey)
        if seen is None or seen.verdict is None:
            return None
        if uid in self.struck or seen.verdict != VALID:
            return False
        return True if uid in self.gains else None

    def predicted(self, uid: int, hotkey: str) -> float | None:
        """Return the predicted gain of its update, applied or not; None if it was not measured."""
        seen = self.seen(uid, hotkey)
        return None if seen is None or uid in self.struck else self.gains.get(uid)

    def evaluated(self, uid: int, hotkey: str) -> EvaluatedUpdate | None:
        """Return its update and the evaluation of it; None without one, and where ``_compared`` is false."""
        seen = self.seen(uid, hotkey)
        if seen is None or seen.evaluation is None or not self._compared(uid, hotkey):
            return None
        return EvaluatedUpdate(seen.evaluation, self._held_out[uid], seen.included)

    def held_out_and_gain(self, uid: int, hotkey: str) -> tuple[float, float]:
        """Return its gain by the held-out gradient, and its predicted gain; NaN where ``_compared`` is false."""
        return (self._held_out[uid], self.gains[uid]) if self._compared(uid, hotkey) else (math.nan, math.nan)

    def _compared(self, uid: int, hotkey: str) -> bool:
        """Return whether a calibration compares its update.

        Not in windows without a measured included update, because any miner could set the scale of their gains.
        """
        there = uid in self.gains and uid not in self.struck and self.seen(uid, hotkey) is not None
        return there and bool(self.included_gains)

    def length(self, uid: int) -> float:
        """Return the length of its step, and at least the shortest whose published numbers have enough digits."""
        return max(self._lengths.get(uid, 0.0), math.sqrt(SHORTEST))

    def held_out_cosine(self, uid: int, hotkey: str) -> float | None:
        """Return its gain by the held-out gradient over the length of the step; None if it was not measured."""
        return None if self.predicted(uid, hotkey) is None else self._per_length(uid, self._held_out[uid])

    def _per_length(self, uid: int, gain: float) -> float:
        return max(-1.0, min(1.0, gain / max(self._lengths[uid], SHORTEST)))

    def cosine(self, uid: int, hotkey: str) -> float | None:
        """Return ``predicted`` over the length of the step, so that the window's scale, set by others, cancels."""
        found = self.predicted(uid, hotkey)
        return None if found is None else self._per_length(uid, found)

    def deviations(self, uid: int, hotkey: str) -> dict[int, float]:
        """Return its update's deviations from the others in all miners' own-pages tests, by the tested uid."""
        return self._deviations.get(uid, {}) if self.seen(uid, hotkey) else {}


def own_pages_tests(evidence: Evidence, *, only: int | None = None) -> dict[tuple[int, int], float]:
    """Return ``deviations`` in a window's own-pages tests, by the uid of the update and the uid of the pages.

    Args:
        only: the uid of the only update to compare; None compares all.
    """
    return deviations(own_pages_products(evidence), evidence.alignment or NOTHING, only=only)


def loss_test(seen: PeerObservation) -> float | None:
    """Return ``loss_indicator`` if the uid's losses were also measured on its assigned pages; else None."""
    measured = seen.evaluation
    return loss_indicator(measured.assigned, measured.held_out) if measured and measured.assigned else None


def trust_step(own_pages: float) -> int:
    """Return the level of trust for this ``own_pages`` factor, from 0 to ``len(TRUST)``."""
    return bisect_right(TRUST, own_pages)


def credit_shares(windows: Sequence[MeasuredWindow]) -> CreditShares:
    """Return the computation of the credits of ``scores(windows)``, for at least one window."""
    hotkeys = windows[-1].hotkeys
    tests = {uid: _own_pages_tests(windows, uid, hotkey) for uid, hotkey in hotkeys.items()}
    own_pages = {uid: own_pages_factor(found, by_loss) for uid, (found, by_loss) in tests.items()}
    return CreditShares(
        credits=_shared(windows, hotkeys, own_pages, MeasuredWindow.counts),
        steps={uid: trust_step(one) for uid, one in own_pages.items()},
        scale=float(_scales(windows)[-1]),
        calibrations=_calibrations(windows, hotkeys),
    )


def scores(windows: Sequence[MeasuredWindow]) -> dict[int, PeerScore]:
    """Return the scores of the miners observed in the last of these windows (ascending); none without a window."""
    if not windows:
        return {}
    hotkeys = windows[-1].hotkeys
    tests = {uid: _own_pages_tests(windows, uid, hotkey) for uid, hotkey in hotkeys.items()}
    own_pages = {uid: own_pages_factor(found, by_loss) for uid, (found, by_loss) in tests.items()}
    shares = _shared(windows, hotkeys, own_pages, MeasuredWindow.counts)
    merits = _shared(windows, hotkeys, own_pages, MeasuredWindow.would_count)
    calibration = _calibrations(windows, hotkeys)
    cosines = np.array([[one.cosine(*miner) for miner in hotkeys.items()] for one in windows], dtype=np.float64)
    means, errors = means_and_errors(cosines)
    peer_scores = {}
    for i, (uid, hotkey) in enumerate(hotkeys.items()):
        trust = own_pages[uid] * calibration[uid].value
        peer_scores[uid] = PeerScore(
            hotkey=hotkey,
            measured=int(np.isfinite(cosines[:, i]).sum()),
            mean=float(means[i]),
            error=float(errors[i]),
            presence=_presence(windows, uid, hotkey),
            credit=shares[uid].value if uid in shares else 0.0,
            merit=merits[uid].value * trust if uid in merits else 0.0,
            tests=len(tests[uid][0] or tests[uid][1]),
            own_pages=own_pages[uid],
            calibration=calibration[uid].value,
            final=shares[uid].value * trust if uid in shares else 0.0,
        )
    return peer_scores


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
    """Return the indicators of the own-pages tests, and the indicators by loss."""
    found = [one.deviations(uid, hotkey) for one in windows]
    on_others = [ahead for one in found for page, ahead in one.items() if page != uid]
    on_own = [one[uid] for one in found if uid in one] if len(on_others) >= FEWEST_OTHER_PAGES else []
    by_loss = [loss_test(seen) for one in windows if (seen := one.seen(uid, hotkey))]
    return [indicator(one, on_others) for one in on_own], [one for one in by_loss if one is not None]


def _calibrations(windows: Sequence[MeasuredWindow], hotkeys: Mapping[int, str]) -> dict[int, Calibration]:
    miners = [*hotkeys.items()]
    updates = {uid: [found for one in windows if (found := one.evaluated(uid, key))] for uid, key in miners}
    pairs = np.array([[one.held_out_and_gain(*miner) for miner in miners] for one in windows])
    scales = _scales(windows)[:, None]
    held_out, gains = np.moveaxis(pairs.reshape(len(windows), len(miners), 2), 2, 0) * scales
    lengths = np.array([[one.length(uid) for uid in hotkeys] for one in windows]) * scales
    counted = np.array([[bool(one.counts(*miner)) for miner in miners] for one in windows], dtype=bool)
    gradient = by_gradient(held_out, gains, lengths, counted)
    loss = by_loss(updates)
    return {uid: Calibration(loss[uid], one) for uid, one in zip(hotkeys, gradient.tolist(), strict=True)}


def _presence(windows: Sequence[MeasuredWindow], uid: int, hotkey: str) -> float:
    counted = [found for one in windows if (found := one.counts(uid, hotkey)) is not None]
    return sum(counted) / len(counted) if counted else 0.0


def _spread(score: PeerScore) -> float:
    """Return the standard deviation of a measured cosine."""
    return score.error * math.sqrt(score.measured)


def pay(score: PeerScore, power: float) -> float:
    """Return ``presence * (final / presence)**power``, before division by the sum over all miners.

    The power applies to the score per window, not to presence: half of the windows earn half of the pay.
    """
    return score.presence * (score.final / score.presence) ** power if score.presence > 0 else 0.0


class Board:
    """The evidence of the last ``pay_windows`` windows, and the scores that follow from it.

    Attributes:
        peer_scores: by uid, of the last window.
    """

    def __init__(self, hparams: HParams) -> None:
        self.hparams = hparams
        self.peer_scores: dict[int, PeerScore] = {}
        self._windows: tuple[MeasuredWindow, ...] = ()

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

    @property
    def _fewest(self) -> int:
        """Number of measured windows from which on a miner is judged."""
        return max(PROVING_WINDOWS, self.hparams.probation_windows)

    def proven(self, uid: int) -> bool | None:
        """Return whether a miner helps the model and no test shows that it repeats another's work; None if unknown.

        False also for a listed miner that can't be judged because it sends too seldom: it would keep its place.
        """
        found = self.peer_scores.get(uid)
        if found is None:
            return None
        if found.measured < self._fewest:
            return False if self._missed(uid, found) >= self._fewest else None
        if found.mean <= CHANCE * found.error or (found.own_pages <= 0 and found.tests >= DISPROVING_TESTS):
            return False
        if self._harms(uid, found) or self._harms_held_out(uid, found):
            return False
        return True if found.mean > PROVEN * found.error else None

    def _missed(self, uid: int, found: PeerScore) -> int:
        """Return in how many windows its update was missing though it was listed, while others were measured."""
        asked = [one for one in self._windows if one.gains and (seen := one.seen(uid, found.hotkey)) and seen.listed]
        return sum(one.would_count(uid, found.hotkey) is False for one in asked)

    def _harms(self, uid: int, found: PeerScore) -> bool:
        """Return whether some of its updates in succession increased the loss beyond chance, regardless of the others.

        Chance is measured by its own spread, but not by far more than the usual one: who helps and harms in turn has a
        large spread.
        """
        gains = [gain for one in self._windows if (gain := one.cosine(uid, found.hotkey)) is not None]
        spread = min(_spread(found), MOST_SPREAD * self._usual_spread)
        return any(
            math.fsum(gains[start : start + length]) < -CHANCE * spread * math.sqrt(length)
            for length in range(PROVING_WINDOWS, self._fewest + 1)
            for start in range(len(gains) - length + 1)
        )

    @property
    def _usual_spread(self) -> float:
        """The median spread of a measured cosine over miners that help beyond chance; infinite if nobody does."""
        helpful = [_spread(one) for one in self.peer_scores.values() if one.mean > CHANCE * one.error]
        return statistics.median(helpful) if helpful else math.inf

    def _harms_held_out(self, uid: int, found: PeerScore) -> bool:
        """Return whether its updates increase the loss on held-out pages beyond chance, whatever they gain on others.

        They may help on most miners' pages, and do harm on a few.
        """
        cosines = [one.held_out_cosine(uid, found.hotkey) for one in self._windows]
        known = [one for one in cosines if one is not None]
        if len(known) < DISPROVING_TESTS:
            return False
        error = statistics.stdev(known) / math.sqrt(len(known))
        return statistics.fmean(known) < -CHANCE * error

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
        self._windows = (*kept, MeasuredWindow(evidence, self.hparams))
        self.peer_scores = scores(self._windows)
        return Outcome(dict(self.peer_scores), self._windows[-1].struck)

    def resume(self, reports: Iterable[ScoreReport]) -> None:
        """Continue from earlier reports (ascending), as from a saved state."""
        self._windows = tuple(MeasuredWindow(one.evidence, self.hparams) for one in reports)
        self.peer_scores = scores(self._windows)

    def state_dict(self) -> dict[str, Any]:
        """Return ``version``, and the ``evidence`` of the last windows."""
        return {"version": VERSION, "evidence": [one.evidence.model_dump(mode="json") for one in self._windows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. Raises StateError for another version or shape; then nothing has changed."""
        if set(state) != {"version", "evidence"} or state["version"] != VERSION:
            raise StateError(f"scores: expected version {VERSION} with evidence, got {sorted(state)}")
        try:
            evidence = (Evidence.model_validate_json(json.dumps(one)) for one in state["evidence"])
            windows = tuple(MeasuredWindow(one, self.hparams) for one in evidence)
            peer_scores = scores(windows)
        except (TypeError, ValueError) as error:
            raise StateError(f"scores: malformed evidence: {error}") from error
        self._windows, self.peer_scores = windows, peer_scores

"""One window's evidence, and the values that follow from it alone."""

import math

import numpy as np

from tplr.hparams import HParams
from tplr.schemas import PRODUCT_DECIMALS, VALID, Alignment, Evidence, PeerObservation
from tplr.scoring.calibration import EvaluatedUpdate
from tplr.scoring.credit import SHORTEST, gram_of
from tplr.scoring.gain import due_tests, own_pages_products, predicted_gains, predicting_tests
from tplr.scoring.own_pages import deviations
from tplr.scoring.penalties import strikes

NOTHING = Alignment(uids=(), products=(), norms=(), gram=())
# Smallest square of a length whose published digits are enough for a cosine.
FEW_DIGITS = 10.0 * 10.0**-PRODUCT_DECIMALS
# If more than this share of the included updates harm in a window, that is nobody's fault in particular.
SHOCK = 0.75


class MeasuredWindow:
    """One window's evidence by integer uid, and the values that follow from it alone.

    Attributes:
        gains: predicted gain of each measured update, by uid.
        measured: the window's alignment with these gains as products.
        included_gains: the gains of the included updates whose miners broke no rule.
        shock: whether more than ``SHOCK`` of the gains of all included updates are negative.
        chosen_lengths: whether miners choose the length of their steps; DeMo gives every update the same one.
    """

    def __init__(self, evidence: Evidence, hparams: HParams) -> None:
        self.evidence = evidence
        self.window = evidence.window
        self.chosen_lengths = hparams.outer == "sparseloco"
        self.struck = strikes(evidence, max_behind=hparams.sync_max_steps_behind)
        alignment = evidence.alignment or NOTHING
        self._unit = alignment.unit
        self._held_out = dict(zip(alignment.uids, alignment.products, strict=True))
        self._middle = dict(zip(alignment.uids, alignment.middle, strict=False))
        self.gains = predicted_gains(alignment, predicting_tests(evidence))
        self.measured = alignment.model_copy(update={"products": tuple(self.gains.values())})
        squares = np.clip(np.diag(gram_of(alignment)), 0.0, None)  # a false report may have negative ones
        self._lengths = dict(zip(alignment.uids, np.sqrt(squares).tolist(), strict=True))
        self._seen = {int(uid): seen for uid, seen in evidence.observations.items()}
        applied = [uid for uid, seen in self._seen.items() if seen.included]
        self._any_own_pages = any(self._seen[uid].assigned_pages for uid in applied)
        measured = [uid for uid in applied if uid in self.gains]
        self.shock = sum(self.gains[uid] < 0 for uid in measured) > SHOCK * len(measured)
        included = [uid for uid in measured if uid not in self.struck]
        self.included_gains = [self.gains[uid] for uid in included]
        longest = max((self._lengths[uid] for uid in included or self._lengths), default=0.0)
        self._shortest = max(SHORTEST * longest**2, FEW_DIGITS)
        self.hotkeys = {uid: self._seen[uid].hotkey for uid in sorted(self._seen)}
        self._deviations: dict[int, dict[int, float]] = {}
        for (uid, page), one in own_pages_tests(evidence).items():
            self._deviations.setdefault(uid, {})[page] = one
        self._missing_tests = missing_tests(evidence)

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

    def evaluated(self, uid: int, hotkey: str) -> EvaluatedUpdate | None:
        """Return its update and the evaluation of it; None without one, and where ``_compared`` is false."""
        seen = self.seen(uid, hotkey)
        if seen is None or seen.evaluation is None or not self._compared(uid, hotkey):
            return None
        predicted = self._held_out[uid] * self._unit / seen.evaluation.held_out.before
        return EvaluatedUpdate(seen.evaluation, predicted, seen.included)

    def held_out_and_gain(self, uid: int, hotkey: str) -> tuple[float, float]:
        """Return its gain by the held-out gradient, and its predicted gain; NaN where ``_compared`` is false."""
        return (self._held_out[uid], self.gains[uid]) if self._compared(uid, hotkey) else (math.nan, math.nan)

    def middle_and_gain(self, uid: int, hotkey: str) -> tuple[float, float]:
        """Return its gain by the gradient after half of the step, and its predicted gain; NaN if one is not known.

        Also where it broke a rule: the update may have been applied.
        """
        there = uid in self._middle and self._measured(uid, hotkey)
        return (self._middle[uid], self.gains[uid]) if there else (math.nan, math.nan)

    def _compared(self, uid: int, hotkey: str) -> bool:
        """Return whether a calibration compares its update.

        Not in windows without a measured included update: nobody is paid for these.
        """
        return self._measured(uid, hotkey) and uid not in self.struck and bool(self.included_gains)

    def _measured(self, uid: int, hotkey: str) -> bool:
        return uid in self.gains and self.seen(uid, hotkey) is not None

    def length(self, uid: int) -> float:
        """Return the length of its step, and at least the shortest whose published numbers have enough digits."""
        return max(self._lengths.get(uid, 0.0), math.sqrt(SHORTEST))

    def _per_length(self, uid: int, gain: float) -> float:
        """Return ``gain`` over the length of the step, or 0 if the step is far shorter than the longest included one.

        While none is included, the longest of all counts. So short a step helps nobody. Steps are clipped to the norm
        caps, so the longest one is of the order of honest ones.
        """
        length = self._lengths[uid]
        return max(-1.0, min(1.0, gain / length)) if length**2 > self._shortest else 0.0

    def cosine(self, uid: int, hotkey: str) -> float | None:
        """Return the predicted gain of its update over the length of the step: it can be compared between windows.

        None if the update was not measured, or if it broke a rule.
        """
        return None if uid in self.struck else self.effect(uid, hotkey)

    def effect(self, uid: int, hotkey: str) -> float | None:
        """As ``cosine``, also where it broke a rule: harm is judged by it, because the update may have been applied."""
        return self._per_length(uid, self.gains[uid]) if self._measured(uid, hotkey) else None

    def held_out_effect(self, uid: int, hotkey: str) -> float | None:
        """As ``effect``, by the held-out gradient alone."""
        return self._per_length(uid, self._held_out[uid]) if self._measured(uid, hotkey) else None

    def applied_unmeasured(self, uid: int, hotkey: str) -> bool:
        """Return whether its update was applied, but not measured, because it names other pages than assigned.

        False where all applied updates do so: then the validator may have other data.
        """
        seen = self.seen(uid, hotkey)
        return self._any_own_pages and seen is not None and seen.included and seen.assigned_pages is False

    def deviations(self, uid: int, hotkey: str) -> dict[int, float]:
        """Return its update's deviations from the others in all miners' own-pages tests, by the tested uid."""
        return self._deviations.get(uid, {}) if self.seen(uid, hotkey) else {}

    def misses_test(self, uid: int, hotkey: str) -> bool:
        """Return whether its own-pages test is missing; see ``missing_tests``."""
        return uid in self._missing_tests and self.seen(uid, hotkey) is not None


def missing_tests(evidence: Evidence) -> set[int]:
    """Return the uids whose own-pages tests were due and possible, and are missing by a fault of the validator."""
    alignment, included = evidence.alignment or NOTHING, _included(evidence)
    missing = [uid for uid in due_tests(evidence) if not evidence.observations[str(uid)].assigned_products]
    # Whether a test is possible does not depend on its products.
    possible = (deviations({uid: alignment.products}, alignment, included, only=uid) for uid in missing)
    return {uid for uid, found in zip(missing, possible, strict=True) if (uid, uid) in found}


def own_pages_tests(evidence: Evidence, *, only: int | None = None) -> dict[tuple[int, int], float]:
    """Return ``deviations`` in a window's own-pages tests, by the uid of the update and the uid of the pages.

    Args:
        only: the uid of the only update to compare; None compares all.
    """
    tests = own_pages_products(evidence)
    return deviations(tests, evidence.alignment or NOTHING, _included(evidence), only=only)


def _included(evidence: Evidence) -> set[int]:
    return {int(uid) for uid, seen in evidence.observations.items() if seen.included}

"""Explains a miner's score in words: every factor, every reason, and the computation of the weight."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tplr.errors import PayloadError
from tplr.hparams import HParams
from tplr.schemas import (
    OUT_OF_SYNC,
    UNREAD,
    Alignment,
    DocumentedScore,
    Evaluation,
    PeerObservation,
    PeerScore,
    ScoreReport,
)
from tplr.scoring.board import TRUST, CreditShares, credit_shares, loss_test, pay, trust_step
from tplr.scoring.calibration import Calibration
from tplr.scoring.credit import CHANCE, Credit
from tplr.scoring.documented.explain import explain_score as explain_documented
from tplr.scoring.gain import predicted_gains, predicting_tests
from tplr.scoring.measured_window import MeasuredWindow, missing_tests, own_pages_tests
from tplr.scoring.measures import LOSS_HIGH, LOSS_LOW, OWN_PAGES_HIGH, OWN_PAGES_LOW, SIGNIFICANT, gain
from tplr.scoring.penalties import BY_CODE
from tplr.scoring.places import Place
from tplr.untrusted import printable

WIDTH = 18
# A published credit differs by so much at most from that of the same evidence on another processor.
TOLERANCE = 1e-6
# The largest of the parts that go to other miners are shown by uid.
NAMED = 4
Row = tuple[str, str]


def measured_window(report: ScoreReport, hparams: HParams) -> MeasuredWindow:
    """The evidence of a report. Raises PayloadError if it contradicts itself."""
    try:
        return MeasuredWindow(report.evidence, hparams)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _contradiction(error) from error


def shares_of(report: ScoreReport, windows: Sequence[MeasuredWindow], probation_windows: int) -> CreditShares | None:
    """Return the computation of the credits of ``report``; None by documented rules, or if evidence is missing.

    Args:
        windows: the evidence of the reports that determine ``report``, ascending, and its own.
        probation_windows: of hparams.

    Raises:
        PayloadError: the report contradicts itself.
    """
    if report.profile == "documented" or tuple(one.window for one in windows) != (*report.follows_from, report.window):
        return None
    try:
        peer_scores = {int(uid): one for uid, one in report.peer_scores.items() if isinstance(one, PeerScore)}
        return credit_shares(windows, peer_scores, probation_windows)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _contradiction(error) from error


def explain(report: ScoreReport, uid: int, *, power: float, shares: CreditShares | None) -> str:
    """Return a table of the content of ``report`` about ``uid``.

    Args:
        power: ``power_normalisation`` of hparams.
        shares: of ``shares_of``.

    Raises:
        PayloadError: as ``explain_rows``.
    """
    if str(uid) not in report.peer_scores:
        known = ", ".join(sorted(report.peer_scores, key=int)) or "no uids"
        return f"uid {uid}: not in the report of validator {report.uid} for window {report.window}, which has {known}"
    rows = explain_rows(report, uid, power=power, shares=shares)
    hotkey = printable(report.observations[str(uid)].hotkey)
    title = f"uid {uid} ({hotkey}) in window {report.window}, seen by validator {report.uid}, {report.profile} rules"
    return "\n".join([title, "", *(f"{name:<{WIDTH}}{printable(text)}" for name, text in rows)])


def explain_rows(report: ScoreReport, uid: int, *, power: float, shares: CreditShares | None) -> list[Row]:
    """The rows of that table: the name of a factor, and what there is to say of it.

    Raises:
        PayloadError: the report contradicts itself, which is possible because only its author has checked it.
    """
    try:
        return _rows(report, uid, power, shares)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _contradiction(error) from error


def _contradiction(error: Exception) -> PayloadError:
    return PayloadError(f"the report is inconsistent, no explanation: {type(error).__name__}")


def _rows(report: ScoreReport, uid: int, power: float, shares: CreditShares | None) -> list[Row]:
    key = str(uid)
    seen, peer_score, struck = report.observations[key], report.peer_scores[key], report.struck.get(key, ())
    return [
        *_observation(seen),
        *_losses(seen.evaluation),
        *(
            [
                *_products(seen, uid, report),
                *_counts(seen, uid, report.alignment, struck),
                *_gains(peer_score, len(report.follows_from) + 1, shares and shares.places.get(uid)),
                *_credit(uid, peer_score, shares),
                *_score(uid, peer_score, shares),
            ]
            if isinstance(peer_score, PeerScore)
            else explain_documented(peer_score, struck, seen.evaluation)
        ),
        *_weight(report, key, peer_score, power),
        *(("own fault", f"{fault}: no miner is blamed for it") for fault in report.faults),
    ]


def _observation(seen: PeerObservation) -> Iterator[Row]:
    asked = "on the peer list" if seen.listed else "on probation" if seen.probation else "not on the peer list"
    sampled = "sampled for evaluation" if seen.sampled else "not sampled for evaluation"
    yield "update", f"{seen.verdict or 'not fetched'}; {asked}, {sampled}"
    if seen.assigned_pages is not None:
        yield "pages", "the assigned ones" if seen.assigned_pages else "not the assigned ones"
    if seen.copied_from is not None:
        yield "overlap", f"{seen.copied}: repeats the update of uid {seen.copied_from}"
    if seen.behind is not None:
        told = {OUT_OF_SYNC: "another model, or none", UNREAD: "not readable: its bucket refused, or did not answer"}
        steps = told.get(seen.behind, f"{seen.behind} steps behind")
        yield "its own report", steps
    if seen.active is False:
        yield "activity", "no recent upload"


def _losses(measured: Evaluation | None) -> Iterator[Row]:
    if measured is None:
        return
    for name, change in (("assigned pages", measured.assigned), ("held-out pages", measured.held_out)):
        if change is not None:
            error = f"error {100 * change.error / change.before:.3f}, {change.sequences} seqs"
            reached = "not finite" if change.after is None else f"{change.after:.4f}"
            yield name, f"loss {change.before:.4f} -> {reached}: {100 * gain(change):+.3f} % ({error})"


def _products(seen: PeerObservation, uid: int, report: ScoreReport) -> Iterator[Row]:
    alignment = report.alignment
    if alignment is None or uid not in alignment.uids:
        return
    tests = predicting_tests(report.evidence)
    predicted, others = predicted_gains(alignment, tests)[uid], len(tests.keys() - {uid})
    gradient = "inner product of its step and the validator's gradient"
    median = f", median over those on held-out pages and on the pages of {others} other miners" if others else ""
    yield "predicted gain", f"{predicted:+.4f} in this window: {gradient}{median or ' on held-out pages'}"
    ahead = {page: one for (_, page), one in own_pages_tests(report.evidence, only=uid).items()}
    if uid in ahead:
        below = sum(one < ahead[uid] for page, one in ahead.items() if page != uid)
        compared = f"more than on those of {below} of {len(ahead) - 1} other tested miners"
        yield "own-pages test", f"{ahead[uid]:+.2f} deviations ahead of others on its own pages, {compared}"
        return
    if uid in missing_tests(report.evidence):
        yield "own-pages test", "missing by the validator's own fault: counts 0 if other miners were tested"
    if (indicator := loss_test(seen)) is not None:
        yield "own-pages test", f"{indicator:+.3f} of 1: above 0 if its own pages improve more than held-out ones"


def _counts(seen: PeerObservation, uid: int, alignment: Alignment | None, struck: Iterable[str]) -> Iterator[Row]:
    for code in struck:
        yield "struck", f"{code}: {BY_CODE[code].meaning}"
    if struck:
        counts = "0: a strike"
    elif not seen.included:
        counts = "0: its update is not in the included set"
    elif alignment is None or uid not in alignment.uids:
        counts = "no value: its update is in the included set, but this validator could not measure it"
    else:
        counts = "its update is in the included set, and was measured"
    yield "this window", counts


def _gains(peer_score: PeerScore, windows: int, place: Place | None) -> Iterator[Row]:
    yield "evidence", f"of {windows} windows; its update was measured in {peer_score.measured} of them"
    yield "mean cosine", f"{peer_score.mean:+.4f} in the measured windows, standard error {peer_score.error:.4f}"
    yield "peer list", f"{_place(place)}; merit {peer_score.merit:.6f}, by which a full list is ordered"
    yield "presence", f"{peer_score.presence:.4f}: share of the windows that count for it"


def _place(place: Place | None) -> str:
    """Explain whether the evidence gives a place on the peer list, apart from rules; None: not recomputed."""
    if place is None:
        return "not recomputed: an earlier report cannot be read"
    told = {True: "earns a place", False: "no place", None: "not proven"}
    return f"{told[place.proven]}: {place.reason}"


def _credit(uid: int, peer_score: PeerScore, shares: CreditShares | None) -> Iterator[Row]:
    step = trust_step(peer_score.own_pages) if shares is None else shares.steps[uid]
    found = None if shares is None else shares.credits.get(uid)
    if found and shares:
        scaled = f"each window's gains are scaled to the usual level around it, this one's by {shares.scale:.4f}"
        spread = f"standard error {found.error:.6f}"
        yield "mean gain", f"{found.mean:+.6f}, {spread}: over the windows that count, 0 in the others; {scaled}"
        yield "beyond chance", _beyond(found)
    yield "trust", _trust(step)
    if found and shares and found.beyond > 0:
        yield "own part", _own_part(found, step, shares.steps)
    yield "credit", _product(peer_score.credit, found, known=shares is not None, trusted=step > 0)


def _beyond(found: Credit) -> str:
    if found.beyond <= 0:
        return f"0: the mean gain is not above {CHANCE:g} standard errors"
    chance = f"(1 - ({CHANCE:g} x {found.error:.6f} / {found.mean:.6f})^2)"
    return f"{found.mean:.6f} x {chance} = {found.beyond:.6f}"


def _trust(step: int) -> str:
    if step <= 0:
        return f"step 0 of {len(TRUST)}: its own-pages factor is 0, so it shares no gain"
    least = "above 0" if step == 1 else f"at least {TRUST[step - 1]:g}"
    return f"step {step} of {len(TRUST)}: its own-pages factor is {least}"


def _own_part(found: Credit, step: int, steps: Mapping[int, int]) -> str:
    own = f"{found.own:.6f} of the gain beyond chance"
    more = {uid: part for uid, part in found.shared.items() if steps[uid] > step}
    equal = {uid: part for uid, part in found.shared.items() if uid not in more}
    told = [
        f"{math.fsum(parts.values()):.6f} of it is shared with {name} trusted miners ({_largest(parts)})"
        for name, parts in (("more", more), ("equally", equal))
        if parts
    ]
    if told:
        return f"{own}; {', '.join(told)}"
    return f"{own}: shared with no other miner" if found.own > 0 else "0: its steps are too short to compare"


def _largest(parts: Mapping[int, float]) -> str:
    uids = sorted(parts, key=lambda uid: (-parts[uid], uid))
    more = f" and {len(uids) - NAMED} more" if len(uids) > NAMED else ""
    return ", ".join(f"uid {uid}: {parts[uid]:.6f}" for uid in uids[:NAMED]) + more


def _product(published: float, found: Credit | None, *, known: bool, trusted: bool) -> str:
    """Explain the computation of the published credit from the rows above it."""
    if not known and (trusted or published):
        return f"{published:.6f}; not recomputed: an earlier report cannot be read"
    value = found.value if found else 0.0
    if not math.isclose(value, published, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        return f"{published:.6f}, but {value:.6f} follows from the published evidence: see tplr audit"
    if found is None:
        return "0: no trust"
    if found.beyond <= 0:
        return "0: no gain beyond chance"
    return f"{found.beyond:.6f} x {found.own:.6f} = {published:.6f}"


def _score(uid: int, peer_score: PeerScore, shares: CreditShares | None) -> Iterator[Row]:
    if peer_score.tests:
        by_loss = f"by loss {LOSS_LOW:g} and {LOSS_HIGH:g}, after {SIGNIFICANT:g} standard errors are added"
        found = shares.indicators.get(uid) if shares else None
        mean = f"mean indicator {math.fsum(found) / len(found):+.4f}: " if found else ""
        span = f"{mean}0 at a mean of {OWN_PAGES_LOW:g}, 1 at {OWN_PAGES_HIGH:g}; {by_loss}"
        yield "own pages", f"{peer_score.own_pages:.4f} after {peer_score.tests} tests ({span})"
    else:
        yield "own pages", "0: not tested in these windows"
    yield "calibration", _calibration(peer_score.calibration, shares and shares.calibrations[uid])
    factors = f"{peer_score.credit:.6f} x {peer_score.own_pages:.4f} x {peer_score.calibration:.4f}"
    yield "final score", f"{factors} = {peer_score.final:.6f}"


def _calibration(published: float, found: Calibration | None) -> str:
    """Explain the published calibration from its factors; None: an earlier report cannot be read."""
    # With DeMo all steps have one length.
    work = "" if found and found.by_length is None else " and that its work explains"
    part = f"the part of its predicted gains that shows on held-out pages{work}, relative to other miners'"
    text = f"{published:.4f}: {part}"
    if found is None:
        return text
    factors = f"{found.by_loss:.4f} by measured losses, {found.by_gradient:.4f} by the gradient there"
    factors += f", {found.by_middle:.4f} by the gradient in the middle of the steps"
    if found.by_length is not None:
        factors += f", {found.by_length:.4f} by the lengths of its steps"
    if not math.isclose(found.value, published, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        return f"{text}; but {factors} follow from the published evidence: see tplr audit"
    return f"{text}; the smallest of {factors}"


def _weight(report: ScoreReport, key: str, score: PeerScore | DocumentedScore, power: float) -> Iterator[Row]:
    weight = report.weights.get(key, 0.0)
    if score.final <= 0:
        yield "weight", "0: the final score is not above 0"
    elif isinstance(score, PeerScore):
        total = sum(pay(one, power) for one in report.peer_scores.values() if isinstance(one, PeerScore))
        raised = f"{score.presence:.4f} x ({score.final:.6f} / {score.presence:.4f})^{power:g}"
        yield "weight", f"{raised} / {total:.6g} = {weight:.6f}"
    else:
        total = sum(one.final**power for one in report.peer_scores.values() if one.final > 0)
        yield "weight", f"{score.final:.6f}^{power:g} / {total:.6g} = {weight:.6f}"
    if report.weights_set:
        last = report.weights_set
        yield (
            "on chain",
            f"{last.intended.get(key, 0.0):.6f} set in block {last.block}, {last.on_chain.get(key, 0.0):.6f} read back",
        )

"""Explains a miner's score in words: every factor, every reason, and how the weight follows from them."""

from collections.abc import Iterator

from tplr.schemas import OUT_OF_SYNC, Evaluation, PeerObservation, PeerScore, ScoreReport
from tplr.scoring.measures import SIGNIFICANT, binary_indicator, gradient_score, relative_improvement
from tplr.scoring.penalties import BY_CODE
from tplr.scoring.rating import Rating
from tplr.seeds import Profile

WIDTH = 18


def explain(report: ScoreReport, uid: int, *, beta: float, power: float) -> str:
    """A table of what ``report`` holds of ``uid``.

    Args:
        beta, power: ``openskill_beta`` and ``power_normalisation`` of hparams.
    """
    key = str(uid)
    if key not in report.peer_scores:
        known = ", ".join(sorted(report.peer_scores, key=int)) or "nobody"
        return f"uid {uid}: validator {report.uid} knows no such miner in window {report.window}; it knows {known}"
    seen, peer_score = report.observations[key], report.peer_scores[key]
    rows = [
        *_observation(seen),
        *_measures(report.profile, seen.evaluation),
        *_score(report.profile, peer_score, report.struck.get(key, ()), beta),
        *_weight(report, key, peer_score, power),
        *(("own fault", f"{fault}: nobody is judged by it") for fault in report.faults),
    ]
    title = (
        f"uid {uid} ({seen.hotkey}) in window {report.window}, seen by validator {report.uid}, {report.profile} rules"
    )
    return "\n".join([title, "", *(f"{name:<{WIDTH}}{text}" for name, text in rows)])


def _observation(seen: PeerObservation) -> Iterator[tuple[str, str]]:
    asked = "on the peer list" if seen.listed else "not on the peer list"
    sampled = "sampled for evaluation" if seen.chosen else "not sampled for evaluation"
    yield "update", f"{seen.verdict or 'not asked for'}; {asked}, {sampled}"
    if seen.own_pages is not None:
        yield "pages", "those it was given" if seen.own_pages else "other pages than it was given"
    if seen.copied_from is not None:
        yield "overlap", f"{seen.copied}: repeats the update of uid {seen.copied_from}"
    if seen.norm_ratio is not None:
        yield "size", f"{seen.norm_ratio:.2f} times the median norm"
    if seen.behind is not None:
        steps = "another model, or none" if seen.behind == OUT_OF_SYNC else f"{seen.behind} steps behind"
        yield "its own report", steps
    if seen.active is False:
        yield "activity", "no upload lately"


def _measures(profile: Profile, measured: Evaluation | None) -> Iterator[tuple[str, str]]:
    if measured is None:
        return
    for name, before, after, error, count in (
        ("assigned pages", measured.own_before, measured.own_after, measured.own_error, measured.own_sequences),
        (
            "held-out pages",
            measured.random_before,
            measured.random_after,
            measured.random_error,
            measured.random_sequences,
        ),
    ):
        better = 100 * relative_improvement(before, after)
        reached = "not finite" if after is None else f"{after:.4f}"
        yield name, f"loss {before:.4f} -> {reached}: {better:+.3f} % (error {100 * error / before:.3f}, {count} seqs)"
    yield "gradient score", f"{gradient_score(measured):+.5f}, the improvement on held-out pages"
    yield (
        "binary indicator",
        f"{binary_indicator(profile, measured):+.3f}: assigned pages against held-out ones"
        + (f", in {SIGNIFICANT:g} standard errors" if profile == "hardened" else ""),
    )


def _score(profile: Profile, peer_score: PeerScore, struck: tuple[str, ...], beta: float) -> Iterator[tuple[str, str]]:
    ordinal = Rating(peer_score.mu, peer_score.sigma).ordinal
    yield "rating", f"mu {peer_score.mu:.3f} - 3 x sigma {peer_score.sigma:.3f} = {ordinal:+.3f}"
    if profile == "hardened":
        yield "gain", f"{peer_score.gain:.4f}: how near its gradient scores come to the upper third, on average"
    yield "binary average", f"{peer_score.binary:+.4f} after {peer_score.evaluations} evaluations"
    yield "sync", f"{peer_score.sync:.4f}"
    rating = f"{ordinal:.3f}"
    if profile == "hardened":
        rating = f"ln(1 + e^({ordinal:.3f} / {beta:g})) x {peer_score.gain:.4f}"
    binary = max(0.0, peer_score.binary) if peer_score.evaluations else 0.0
    yield "base", f"{rating} x {binary:.4f} x {peer_score.sync:.4f} = {peer_score.base:.6f}"
    for code in sorted({*struck, *peer_score.multipliers}):
        now = "struck in this window" if code in struck else "recovering"
        yield "penalty", f"{code} x {peer_score.multipliers.get(code, 1.0):.4f} ({now}): {BY_CODE[code].meaning}"
    product = " x ".join(["base", *(f"{one:.4f}" for one in peer_score.multipliers.values())])
    yield "final score", f"{product} = {peer_score.final:.6f}"


def _weight(report: ScoreReport, key: str, peer_score: PeerScore, power: float) -> Iterator[tuple[str, str]]:
    total = sum(one.final**power for one in report.peer_scores.values() if one.final > 0)
    weight = report.weights.get(key, 0.0)
    if peer_score.final > 0:
        yield "weight", f"{peer_score.final:.6f}^{power:g} / {total:.6f} = {weight:.6f}"
    else:
        yield "weight", "0: the final score is not above 0"
    if report.weights_set:
        last = report.weights_set
        yield (
            "on chain",
            f"{last.intended.get(key, 0.0):.6f} set in block {last.block}, {last.on_chain.get(key, 0.0):.6f} read back",
        )

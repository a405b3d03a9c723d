"""The factors of a documented score, in words."""

from collections.abc import Collection, Iterator

from tplr.schemas import DocumentedScore, Evaluation
from tplr.scoring.documented.measures import binary_indicator
from tplr.scoring.documented.penalties import BY_CODE
from tplr.scoring.documented.rating import Rating
from tplr.scoring.measures import measured_gain


def explain_score(
    peer_score: DocumentedScore, struck: Collection[str], measured: Evaluation | None
) -> Iterator[tuple[str, str]]:
    """Yield rows of name and text."""
    if measured is not None:
        yield "gradient score", f"{measured_gain(measured):+.5f}, the improvement on held-out pages"
        yield "binary indicator", f"{binary_indicator(measured):+.0f}: assigned pages against held-out ones"
    ordinal = Rating(peer_score.mu, peer_score.sigma).ordinal
    yield "rating", f"mu {peer_score.mu:.3f} - 3 x sigma {peer_score.sigma:.3f} = {ordinal:+.3f}"
    yield "binary average", f"{peer_score.binary:+.4f} after {peer_score.evaluations} evaluations"
    yield "sync", f"{peer_score.sync:.4f}"
    binary = max(0.0, peer_score.binary)
    yield "base", f"{ordinal:.3f} x {binary:.4f} x {peer_score.sync:.4f} = {peer_score.base:.6f}"
    for code in sorted({*struck, *peer_score.multipliers}):
        now = "struck in this window" if code in struck else "until the next evaluation"
        yield "penalty", f"{code} x {peer_score.multipliers.get(code, 1.0):.4f} ({now}): {BY_CODE[code].meaning}"
    product = " x ".join(["base", *(f"{one:.4f}" for one in peer_score.multipliers.values())])
    yield "final score", f"{product} = {peer_score.final:.6f}"

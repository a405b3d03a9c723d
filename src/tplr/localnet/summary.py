"""Summarizes a run: figures and outcomes, computed from events and the weights on chain."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from tplr.watch.view import NetworkView, NodeView

# Smallest relative decrease of a validator's loss: more than the difference between windows' pages, less than a short
# run achieves.
MIN_FALL = 0.01
MAX_STALL = 3  # windows in which a node may apply nothing new, or all may apply an empty set
MANY_MISSED = 0.1  # share of the miners' windows from which on the machine is too slow or busy
ENDS = 3  # windows averaged at each end of a curve; fewer if they would overlap


@dataclass(frozen=True)
class MinerSummary:
    """A miner. Losses in nats per token; ``gathered`` counts the windows that included its update.

    ``bits_per_parameter``: size of an update divided by the model's parameters; ``weight``: the smallest that any
    validator gives it.
    """

    name: str
    uid: int | None
    loss_start: float | None
    loss_end: float | None
    windows_done: int
    windows_missed: int
    gathered: int
    update_bytes: int
    bits_per_parameter: float | None
    score: float | None
    weight: float


@dataclass(frozen=True)
class RunOutcome:
    """A condition that a run must meet, its result, and the figures behind it."""

    name: str
    passed: bool
    text: str


@dataclass(frozen=True)
class Summary:
    """A run's figures. ``loss_start``, ``loss_end``: the validator's loss on held-out pages, in nats per token.

    ``advice``: what would make a run on this machine better; empty for nothing.
    """

    start_window: int | None
    windows_asked: int
    windows_done: int
    loss_start: float | None
    loss_end: float | None
    shared_windows: int
    differing_windows: tuple[int, ...]
    miners: tuple[MinerSummary, ...]
    weights: dict[int, dict[int, float]]
    outcomes: tuple[RunOutcome, ...]
    advice: str

    @property
    def passed(self) -> bool:
        """Whether every outcome passed."""
        return all(outcome.passed for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``summary.json``."""
        return {"passed": self.passed, **asdict(self)}


def summarize(
    view: NetworkView,
    weights: Mapping[int, Mapping[int, float]],
    *,
    windows: int,
    window_seconds: float | None = None,
) -> Summary:
    """Summarize the run's first ``windows`` windows; ``weights``: those on chain, by the validator's uid.

    Args:
        window_seconds: a window's length; None: faults were injected that excuse stalls and missed windows.
    """
    start = view.start_window
    span = range(0) if start is None else range(start, start + windows)
    loss_start, loss_end = curve_ends(view.validator.held_out_loss, span)
    rows = rows_of(view, weights)
    miners = tuple(_miner(miner, view.validator, rows, span) for miner in view.miners)
    differing = view.disagreements()
    return Summary(
        start_window=start,
        windows_asked=windows,
        windows_done=min(view.completed, windows),
        loss_start=loss_start,
        loss_end=loss_end,
        shared_windows=len(view.shared_windows()),
        differing_windows=tuple(differing),
        miners=miners,
        weights={validator: dict(row) for validator, row in weights.items()},
        outcomes=(
            _windows_outcome(view, windows),
            _loss_outcome(loss_start, loss_end),
            _agreement_outcome(view, differing),
            *([_included_outcome(view)] if view.aggregates else []),
            _weights_outcome(miners),
            *([_progress_outcome(view, span, window_seconds)] if window_seconds else []),
            *(_attacks_outcome(node) for node in view.hostile),
        ),
        advice=_advice(miners, windows, window_seconds) if window_seconds else "",
    )


def rows_of(view: NetworkView, weights: Mapping[int, Mapping[int, float]]) -> list[Mapping[int, float]]:
    """Return each validator's weights from those on chain; empty for a validator that has set none."""
    return [{} if node.uid is None else weights.get(node.uid, {}) for node in view.validators]


def curve_ends(losses: Mapping[int, float], span: range) -> tuple[float | None, float | None]:
    """Return the means of the first and of the last losses within ``span``; None and None for fewer than two losses."""
    values = [losses[window] for window in sorted(losses) if window in span]
    count = min(ENDS, len(values) // 2)
    return (fmean(values[:count]), fmean(values[-count:])) if count else (None, None)


def fall(start: float, end: float) -> float:
    """Return the decrease of a loss as a share of ``start``."""
    return (start - end) / start


def _miner(node: NodeView, validator: NodeView, rows: Sequence[Mapping[int, float]], span: range) -> MinerSummary:
    """``rows``: weights on chain, of each validator."""
    loss_start, loss_end = curve_ends(node.training_loss, span)
    missed = {window for window in node.missed if window in span}
    return MinerSummary(
        name=node.name,
        uid=node.uid,
        loss_start=loss_start,
        loss_end=loss_end,
        windows_done=len({window for window in node.uploaded if window in span} - missed),
        windows_missed=len(missed),
        gathered=sum(node.uid in validator.applied[window].included for window in span if window in validator.applied),
        update_bytes=node.update_bytes,
        bits_per_parameter=8 * node.update_bytes / node.parameters if node.parameters else None,
        score=None if node.uid is None else validator.scores.get(node.uid),
        weight=0.0 if node.uid is None else min(row.get(node.uid, 0.0) for row in rows),
    )


def _windows_outcome(view: NetworkView, windows: int) -> RunOutcome:
    done = min(view.completed, windows)
    behind = [node.name for node in view.honest if _progress(view, node) < windows]
    text = f"{done} of {windows} windows completed by all nodes"
    return RunOutcome("windows", not behind, f"{text}; behind: {_names(behind)}" if behind else text)


def _progress(view: NetworkView, node: NodeView) -> int:
    return 0 if view.start_window is None or node.window is None else node.window - view.start_window + 1


def _loss_outcome(start: float | None, end: float | None) -> RunOutcome:
    if start is None or end is None:
        return RunOutcome("loss", False, "the validator measured a loss in fewer than two windows")
    lower = fall(start, end)
    # NaN fails this comparison, as it must.
    text = f"validator's loss on held-out pages {start:.3f} → {end:.3f}: {-100 * lower:+.1f} %"
    passed = lower >= MIN_FALL
    return RunOutcome("loss", passed, text if passed else f"{text}; expected {-100 * MIN_FALL:+.0f} % or lower")


def _agreement_outcome(view: NetworkView, differing: Mapping[int, Mapping[str, str]]) -> RunOutcome:
    shared = view.shared_windows()
    if not shared:
        return RunOutcome("agreement", False, "no window was applied by two nodes: agreement can't be checked")
    if not differing:
        return RunOutcome("agreement", True, f"models equal on all nodes after each of {len(shared)} windows")
    window, held = next(iter(differing.items()))
    groups: dict[str, list[str]] = {}
    for name, fingerprint in held.items():
        groups.setdefault(fingerprint, []).append(name)
    sides = " against ".join(_names(names) for names in groups.values())
    return RunOutcome(
        "agreement", False, f"models differ in {len(differing)} windows, first in window {window}: {sides}"
    )


def _included_outcome(view: NetworkView) -> RunOutcome:
    published = view.included
    if not published:
        return RunOutcome("included sets", False, "the aggregator published none")
    other = [
        f"{node.name} in window {window}"
        for node in view.honest
        for window, applied in sorted(node.applied.items())
        if applied.included != published.get(window, applied.included)
    ]
    if other:
        return RunOutcome("included sets", False, f"{len(other)} times another set was applied, first by {other[0]}")
    return RunOutcome("included sets", True, f"all nodes applied the {len(published)} published sets")


def _weights_outcome(miners: Sequence[MinerSummary]) -> RunOutcome:
    unpaid = [miner.name for miner in miners if not miner.weight > 0]
    if unpaid:
        return RunOutcome("weights", False, f"no positive weight on chain: {_names(unpaid)}")
    paid = ", ".join(f"{miner.name} {miner.weight:.3f}" for miner in miners)
    return RunOutcome("weights", True, f"weights on chain: {paid}")


def _progress_outcome(view: NetworkView, span: range, window_seconds: float) -> RunOutcome:
    """Fail if a node applied nothing new, or all sets were empty, for more than ``MAX_STALL`` windows."""
    stalls = {node.name: stalled_windows(node.reached, window_seconds) for node in view.honest if node.reached}
    if not stalls:
        return RunOutcome("progress", False, "no node applied a window")
    name = max(stalls, key=lambda name: stalls[name])
    empty = longest_empty(
        [view.validator.applied[window].included for window in span if window in view.validator.applied]
    )
    text = f"longest stall: {name}, {stalls[name]:.1f} windows; windows in a row without an update: {empty}"
    passed = stalls[name] <= MAX_STALL and empty <= MAX_STALL
    return RunOutcome("progress", passed, text if passed else f"{text}; expected at most {MAX_STALL}")


def _advice(miners: Sequence[MinerSummary], windows: int, window_seconds: float) -> str:
    missed, all_windows = sum(miner.windows_missed for miner in miners), windows * len(miners)
    if missed < MANY_MISSED * all_windows:
        return ""
    return (
        f"miners missed {missed} of {all_windows} windows: this machine is too slow, or busy, for windows of "
        f"{window_seconds:g} s; --window-seconds {2 * window_seconds:g} gives them more time"
    )


def stalled_windows(reached: Mapping[int, float], window_seconds: float) -> float:
    """Return the longest delay, in windows, of a node with the next window; ``reached`` as in ``NodeView``."""
    times = sorted(reached.values())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return max(0.0, max(gaps, default=0.0) / window_seconds - 1)


def longest_empty(included: Sequence[Sequence[int]]) -> int:
    """Return the longest sequence of empty sets after the first non-empty one: a run's first windows only measure."""
    longest = current = 0
    for uids in itertools.dropwhile(lambda uids: not uids, included):
        current = 0 if uids else current + 1
        longest = max(longest, current)
    return longest


def _attacks_outcome(node: NodeView) -> RunOutcome:
    if not node.attacks:
        return RunOutcome("attacks", False, f"{node.name} was expected to lie, but did not")
    told = ", ".join(f"{behaviour} {count}" for behaviour, count in sorted(node.attacks.items()))
    return RunOutcome("attacks", True, f"{node.name} lied {node.attacks.total()} times: {told}")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)

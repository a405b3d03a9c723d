"""One frame of ``tplr watch``: the window and its time, the nodes, the elections, and problems."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from tplr.untrusted import printable
from tplr.watch.display import MAX_NOTE, models_text, node_table, number, problem_lines
from tplr.watch.view import NetworkView, NodeView

# Lines of a terminal that are not rows of nodes, including a few problems.
OTHER_LINES = 16
# Windows without a block until the chain counts as silent: an event file names one block of each window.
LATE = 1.2


@dataclass(frozen=True)
class Frame:
    """The known state of a network at one time.

    Attributes:
        columns: columns of the table of nodes; names of ``display.CELLS``.
        facts: lines above the table.
        notes: lines for problems that do not belong to a node.
    """

    title: str
    view: NetworkView
    columns: tuple[str, ...]
    facts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def noting(self, *notes: str) -> "Frame":
        """Return this frame with additional notes."""
        return replace(self, notes=(*self.notes, *notes))


def render_frame(frame: Frame, *, now: float | None = None, lines: int | None = None) -> RenderableType:
    """Draw a frame as of the unix time ``now`` (default: current time), with as many node rows as ``lines`` allow."""
    view = frame.view
    rows = _rows(view)
    shown = rows if lines is None else rows[: max(1, lines - OTHER_LINES)]
    head = [_clock_text(view, time.time() if now is None else now), *map(Text, frame.facts), *_elections(view)]
    more = [Text(f"and {len(rows) - len(shown)} more nodes", "dim")] if len(shown) < len(rows) else []
    notes = [Text(printable(note[:MAX_NOTE]), "yellow") for note in frame.notes]
    table = node_table(view, frame.columns, shown)
    models = [models_text(view)] if len(view.nodes) > 1 else []  # a single node has no other model to compare with
    parts = (*head, *models, Text(), table, *more, *problem_lines(view), *notes)
    return Panel(Group(*parts), title=Text(frame.title), title_align="left", expand=False)


def _rows(view: NetworkView) -> list[NodeView]:
    """Return validators by stake, then miners by pay, including miners that only a validator's scores name."""
    judge = view.judge
    paid = judge.weights if judge else {}
    known = {node.uid for node in view.nodes.values()}
    named = sorted({*judge.scores, *judge.weights} - known) if judge else []
    others = [NodeView(f"miner {uid}", "miner", uid=uid, running=True, doing="") for uid in named]
    rest = [node for node in view.nodes.values() if node.role != "miner"]
    miners = [node for node in view.nodes.values() if node.role == "miner"]
    return [
        *sorted(rest, key=lambda node: (node.role != "validator", -(node.stake or 0.0), node.name)),
        *sorted((*miners, *others), key=lambda node: -paid.get(-1 if node.uid is None else node.uid, 0.0)),
    ]


def _clock_text(view: NetworkView, now: float) -> Text:
    clock = view.clock
    if clock is None:
        return Text("no window is known yet", "dim")
    text = f"window {clock.window}, block {clock.block}"
    age = clock.block_age + now - clock.at
    if age > LATE * clock.window_seconds:
        return Text(
            f"{text}: no newer block for {age:.0f} s, longer than a window ({clock.window_seconds:.0f} s)", "red"
        )
    left = clock.left(now)
    return Text(text if left is None else f"{text}: {left:.0f} s left of {clock.window_seconds:.0f} s")


def _elections(view: NetworkView) -> Sequence[Text]:
    """Return lines with the number of decided windows, and the undecided windows before decided ones."""
    decided = {window: one for window, one in view.elections.items() if one.decided}
    if not decided:
        return [Text("none of these windows is decided", "yellow")] if view.elections else []
    newest = max(decided)
    late = [str(window) for window in sorted(view.elections) if window < newest and window not in decided]
    void = [str(window) for window, one in sorted(decided.items()) if one.void]
    share = decided[newest].committed
    parts = [
        f"elections: {len(decided)} of {len(view.elections)} windows decided, the newest is {newest}",
        f"with {share:.0%} of the stake" if share is not None else "",
    ]
    text = Text(" ".join(filter(None, parts)))
    if void:
        text.append(f"; void: {', '.join(void)}")
    if late:
        text.append(f"; not decided: {', '.join(late)}", "yellow")
    return [text]


def loss_fact(view: NetworkView) -> tuple[str, ...]:
    """Return a line with the newest loss on held-out pages, if there is one."""
    for node in view.validators:
        if node.held_out_loss:
            window = max(node.held_out_loss)
            return (f"loss on held-out pages {number(node.held_out_loss[window])} ({node.name}, window {window})",)
    return ()

"""Displays a localnet: as a live table in a terminal, or as lines in a log file."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tplr.localnet.summary import Summary, fall
from tplr.watch.display import models_text, node_table, number, open_live, plain_table, problem_lines
from tplr.watch.view import NetworkView, NodeView

COLUMNS = ("node", "doing", "uid", "window", "loss", "use", "gathered", "kB", "score", "weight")


def open_display(console: Console, windows: int) -> AbstractContextManager[Callable[[NetworkView], None]]:
    """Yields a function that shows a view: as a table redrawn in place if ``console`` is a terminal, else as lines."""
    return open_live(console, lambda view: render_view(view, windows), PlainDisplay(console, windows).show)


class PlainDisplay:
    """Prints a line when all nodes have completed a window, and when a node starts, ends or has a problem."""

    def __init__(self, console: Console, windows: int) -> None:
        self._console = console
        self._windows = windows
        self._completed = 0
        self._notes: dict[str, str] = {}

    def show(self, view: NetworkView) -> None:
        for node in view.nodes.values():
            if self._notes.get(node.name) != (note := _note(node)):
                self._notes[node.name] = note
                self._print(f"{node.name}: {note}")
        for count in range(self._completed + 1, view.completed + 1):
            self._print(window_line(view, count, self._windows))
        self._completed = max(self._completed, view.completed)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def window_line(view: NetworkView, count: int, windows: int) -> str:
    """One line about the ``count``-th window of the run (from 1), which all nodes have completed."""
    assert view.start_window is not None
    window = view.start_window + count - 1
    losses = " ".join(number(miner.training_loss.get(window)) for miner in view.miners)
    applied = [node.applied[window] for node in view.honest if window in node.applied]
    counts = sorted({f"{len(one.included)} of {len(one.included) + len(one.skipped)}" for one in applied})
    models = "models differ" if window in view.disagreements() else "models equal"
    return (
        f"window {window} ({count} of {max(count, windows)}): training loss {losses}, "
        f"held-out pages {number(view.validator.held_out_loss.get(window))}, gathered {' / '.join(counts)}, {models}"
    )


def render_view(view: NetworkView, windows: int) -> RenderableType:
    """The live table: a row for each node, the last problem of each, and the progress. Fits 80 columns."""
    done = min(view.completed, windows)
    progress = Table.grid(padding=(0, 2))
    progress.add_row(
        ProgressBar(total=windows, completed=done, width=24), f"{done} of {windows} windows", models_text(view)
    )
    return Panel(
        Group(node_table(view, COLUMNS), *problem_lines(view), "", progress),
        title="templar localnet",
        title_align="left",
        expand=False,
    )


def render_summary(summary: Summary) -> RenderableType:
    """The end of a run: a table of figures and a list of verdicts. The table fits 80 columns."""
    table = plain_table("node", "uid", "loss", "", "done", "missed", "gathered", "kB", "bits", "score", "weight")
    for miner in summary.miners:
        table.add_row(
            miner.name,
            "" if miner.uid is None else str(miner.uid),
            *_ends(miner.loss_start, miner.loss_end),
            str(miner.windows_done),
            str(miner.windows_missed),
            str(miner.gathered),
            number(miner.update_bytes / 1000, 1),
            number(miner.bits_per_parameter, 2),
            number(miner.score, 4),
            number(miner.weight),
        )
    table.add_row("validator", "", *_ends(summary.loss_start, summary.loss_end), str(summary.windows_done))
    legend = "done, missed, gathered: windows; kB: size of an update; bits: per parameter"
    outcomes = Table.grid(padding=(0, 2))
    for outcome in summary.outcomes:
        mark = Text("ok", style="bold green") if outcome.passed else Text("FAILED", style="bold red")
        outcomes.add_row(mark, Text(outcome.text))
    if summary.advice:
        outcomes.add_row(Text("note", style="bold yellow"), Text(summary.advice))
    return Group("", table, Text(legend, style="dim"), "", outcomes)


def _note(node: NodeView) -> str:
    if not node.running:
        return "down"
    return node.problem or ("running" if node.uid is not None else "starting")


def _ends(start: float | None, end: float | None) -> tuple[str, str]:
    if start is None or end is None:
        return "", ""
    return f"{start:.3f} → {end:.3f}", f"{-100 * fall(start, end):+.1f} %"

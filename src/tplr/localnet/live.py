"""Displays a localnet: as a live table in a terminal, as lines in a log file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tplr.localnet.summary import Summary, fall
from tplr.localnet.view import NEXT, NetworkView, NodeView


@contextmanager
def open_display(console: Console, windows: int) -> Iterator[Callable[[NetworkView], None]]:
    """Yields a function that shows a view: as a table redrawn in place if ``console`` is a terminal, else as lines."""
    if not console.is_terminal:
        yield PlainDisplay(console, windows).show
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda view: live.update(render_view(view, windows), refresh=True)


class PlainDisplay:
    """Prints a line when all nodes completed a window, and when a node starts, ends or has a problem."""

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
        for number in range(self._completed + 1, view.completed + 1):
            self._print(window_line(view, number, self._windows))
        self._completed = max(self._completed, view.completed)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def window_line(view: NetworkView, number: int, windows: int) -> str:
    """One line about the ``number``-th window of the run (from 1), which all nodes have completed."""
    assert view.start_window is not None
    window = view.start_window + number - 1
    losses = " ".join(_number(miner.training_loss.get(window)) for miner in view.miners)
    applied = [node.applied[window] for node in view.honest if window in node.applied]
    counts = sorted({f"{len(one.included)} of {len(one.included) + len(one.skipped)}" for one in applied})
    models = "models differ" if window in view.disagreements() else "models equal"
    return (
        f"window {window} ({number} of {windows}): training loss {losses}, "
        f"held-out pages {_number(view.validator.held_out_loss.get(window))}, gathered {' / '.join(counts)}, {models}"
    )


def render_view(view: NetworkView, windows: int) -> RenderableType:
    """The live table: a row for each node, the last problem of each, and the progress. Fits 80 columns."""
    table = _table("node", "doing", "uid", "window", "loss", "use", "gathered", "kB", "score", "weight")
    table.columns[1].min_width = max(map(len, NEXT.values()))  # so that the table keeps its width
    for node in view.nodes.values():
        table.add_row(*_row(node, view.validator))
    problems = [Text(f"{node.name}: {node.problem}", "yellow") for node in view.nodes.values() if node.problem]
    models = Text("models differ", style="bold red") if view.disagreements() else Text("models equal", style="green")
    state = models if view.shared_windows() else Text("waiting for the first window", style="dim")
    done = min(view.completed, windows)
    progress = Table.grid(padding=(0, 2))
    progress.add_row(ProgressBar(total=windows, completed=done, width=24), f"{done} of {windows} windows", state)
    return Panel(Group(table, *problems, "", progress), title="templar localnet", title_align="left", expand=False)


def render_summary(summary: Summary) -> RenderableType:
    """The end of a run: a table of figures and a list of verdicts. The table fits 80 columns."""
    table = _table("node", "uid", "loss", "", "done", "missed", "gathered", "kB", "bits", "score", "weight")
    for miner in summary.miners:
        table.add_row(
            miner.name,
            "" if miner.uid is None else str(miner.uid),
            *_ends(miner.loss_start, miner.loss_end),
            str(miner.windows_done),
            str(miner.windows_missed),
            str(miner.gathered),
            _number(miner.update_bytes / 1000, 1),
            _number(miner.bits_per_parameter, 2),
            _number(miner.score, 4),
            _number(miner.weight),
        )
    table.add_row("validator", "", *_ends(summary.loss_start, summary.loss_end), str(summary.windows_done))
    legend = "done, missed, gathered: windows; kB: size of an update; bits: per parameter"
    outcomes = Table.grid(padding=(0, 2))
    for outcome in summary.outcomes:
        mark = Text("ok", style="bold green") if outcome.passed else Text("FAILED", style="bold red")
        outcomes.add_row(mark, Text(outcome.text))
    return Group("", table, Text(legend, style="dim"), "", outcomes)


def _table(*headings: str) -> Table:
    """A table without lines: text left-aligned, numbers right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("node", "doing") else "right", no_wrap=True)
    return table


def _note(node: NodeView) -> str:
    if not node.running:
        return "down"
    return node.problem or ("running" if node.uid is not None else "starting")


def _row(node: NodeView, validator: NodeView) -> list[str | Text]:
    losses = node.held_out_loss if node.role == "validator" else node.training_loss
    last = None if node.window is None else node.applied.get(node.window)
    gathered = f"{len(last.included)} of {len(last.included) + len(last.skipped)}" if last else ""
    if node.role == "aggregator" and node.aggregated:
        gathered = str(len(node.aggregated[max(node.aggregated)]))
    judged = node.uid if node.role == "miner" else None
    return [
        node.name,
        node.doing if node.running else Text("down", style="bold red"),
        "" if node.uid is None else str(node.uid),
        "" if node.window is None else str(node.window),
        _number(losses[max(losses)] if losses else None),
        f"{node.utilisation[max(node.utilisation)]:.0%}" if node.utilisation else "",
        gathered,
        _number(node.update_bytes / 1000, 1) if node.update_bytes else "",
        _number(None if judged is None else validator.scores.get(judged), 4),
        _number(None if judged is None else validator.weights.get(judged)),
    ]


def _ends(start: float | None, end: float | None) -> tuple[str, str]:
    if start is None or end is None:
        return "", ""
    return f"{start:.3f} → {end:.3f}", f"{-100 * fall(start, end):+.1f} %"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"

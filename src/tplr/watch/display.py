"""Draws a ``NetworkView`` in a terminal: the parts that the localnet and ``tplr watch`` share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tplr.untrusted import printable
from tplr.watch.view import NEXT, NetworkView, NodeView

T = TypeVar("T")
MAX_NOTE = 300  # characters of a line about a problem
FIXED = 1e9  # larger numbers, which only strangers claim, have an exponent


@contextmanager
def open_live(
    console: Console, render: Callable[[T], RenderableType], plain: Callable[[T], None]
) -> Iterator[Callable[[T], None]]:
    """Yield a function that shows a state: redrawn in place if ``console`` is a terminal, else by ``plain``."""
    if not console.is_terminal:
        yield plain
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda state: live.update(render(state), refresh=True)


def node_table(view: NetworkView, columns: Sequence[str], nodes: Sequence[NodeView] | None = None) -> Table:
    """Return a table with a row for each of ``nodes`` (default: all); ``columns`` are names of ``CELLS``."""
    table = plain_table(*columns)
    if "doing" in columns:  # so that the table keeps its width
        table.columns[columns.index("doing")].min_width = max(map(len, NEXT.values()))
    for node in view.nodes.values() if nodes is None else nodes:
        table.add_row(*(CELLS[column](node, view) for column in columns))
    return table


def problem_lines(view: NetworkView) -> list[Text]:
    """Return a line for each node's problem, and for each node with outdated software or rules."""
    found = [
        Text(f"{node.name}: {printable(node.problem[:MAX_NOTE])}", "yellow")
        for node in view.nodes.values()
        if node.problem
    ]
    return found + [Text(f"{node.name}: {node.outdated}", "bold red") for node in view.nodes.values() if node.outdated]


def models_text(view: NetworkView) -> Text:
    """Return the text that says whether the nodes' models are equal."""
    if not view.shared_windows():
        return Text("waiting for the first window", style="dim")
    return Text("models differ", style="bold red") if view.disagreements() else Text("models equal", style="green")


def plain_table(*headings: str) -> Table:
    """Return a table without lines: text left-aligned, numbers right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("node", "doing") else "right", no_wrap=True)
    return table


def number(value: float | None, digits: int = 3) -> str:
    """Format a number; an empty text if it is not known."""
    if value is None:
        return ""
    return f"{value:.{digits}f}" if abs(value) < FIXED else f"{value:.{digits}g}"


def _loss(node: NodeView, _: NetworkView) -> str:
    losses = node.held_out_loss if node.role == "validator" else node.training_loss
    return number(losses[max(losses)] if losses else None)


def _gathered(node: NodeView, _: NetworkView) -> str:
    if node.role == "aggregator" and node.aggregated:
        return str(len(node.aggregated[max(node.aggregated)]))
    last = None if node.window is None else node.applied.get(node.window)
    return f"{len(last.included)} of {len(last.included) + len(last.skipped)}" if last else ""


def _included(node: NodeView, view: NetworkView) -> str:
    if node.role != "miner" or node.uid is None:
        return ""
    included, asked = view.inclusions(node.uid)
    return f"{included} of {asked}" if asked else ""


def _score(node: NodeView, view: NetworkView) -> str:
    return number(_judged(node, view, "scores"), 4)


def _weight(node: NodeView, view: NetworkView) -> str:
    return number(_judged(node, view, "weights"))


def _judged(node: NodeView, view: NetworkView, field: str) -> float | None:
    if node.role != "miner" or node.uid is None or view.judge is None:
        return None
    return getattr(view.judge, field).get(node.uid)


# Columns of tables, by heading.
CELLS: dict[str, Callable[[NodeView, NetworkView], str | Text]] = {
    "node": lambda node, _: node.name,
    "doing": lambda node, _: node.doing if node.running else Text("down", style="bold red"),
    "uid": lambda node, _: "" if node.uid is None else str(node.uid),
    "window": lambda node, _: "" if node.window is None else str(node.window),
    "loss": _loss,
    "use": lambda node, _: f"{node.utilisation[max(node.utilisation)]:.0%}" if node.utilisation else "",
    "gathered": _gathered,
    "kB": lambda node, _: number(node.update_bytes / 1000, 1) if node.update_bytes else "",
    "included": _included,
    "missed": lambda node, _: str(len(node.missed)) if node.role == "miner" else "",
    "score": _score,
    "weight": _weight,
    # The same columns, under the public names of scores.
    "credit": _score,
    "pay": _weight,
    "stake": lambda node, _: "" if node.stake is None else f"{node.stake:.0%}",
}

"""Shared drawing functions for the pictures of ``docs/benchmarks``: bars, legends, and columns of a CSV file.

Bars are horizontal and start at zero, with full labels. A bar is a median, and a dot one repetition. Legends are beside
the axes.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20

Rows = Sequence[Mapping[str, str]]


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches; nothing is cut off at its borders."""
    from matplotlib.figure import Figure  # here: benchmarks import this module in processes that they measure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # pyright: ignore[reportOptionalMemberAccess]
    return figure


def save(figure: "Figure", path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def beside(axes: Any) -> None:
    """Draw the legend of ``axes`` to the right of them."""
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)


def bars(axes: Any, values: Mapping[str, Sequence[float]], *, unit: str, colour: Any = "tab:blue") -> None:
    """Draw one bar for each name, the first on top: the median with its figure, and a dot for each value.

    An empty sequence is shown as not measured. ``colour`` is one colour for all bars, or a sequence.
    """
    middle = [statistics.median(found) if found else 0.0 for found in values.values()]
    axes.barh(list(values), middle, color=colour, height=0.7)
    for place, found in enumerate(values.values()):
        if len(found) > 1:
            axes.plot(found, [place] * len(found), ".", color="black", markersize=4)
        text = f"{middle[place]:.3g}" if middle[place] < 1000 else f"{middle[place]:,.0f}"
        end = max(found, default=0.0)
        axes.annotate(
            text if found else "not measured",
            (end, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},  # a limit's line does not cross it
        )
    axes.invert_yaxis()
    every = [0.0, *(one for found in values.values() for one in found)]
    axes.set_xlim(1.18 * min(every), 1.18 * max(every) or 1.0)
    repeated = any(len(found) > 1 for found in values.values())
    axes.set_xlabel(f"{unit}\n(median; dots: repetitions)" if repeated else unit)


def column(rows: Rows, name: str, **wanted: str) -> list[float]:
    """Return the figures in one column of the rows that match."""
    return [float(row[name]) for row in rows if wanted.items() <= row.items() and row[name]]


def values_of(rows: Rows, name: str) -> list[str]:
    """Return the distinct values of a column, in the order of their first rows."""
    return list(dict.fromkeys(row[name] for row in rows))

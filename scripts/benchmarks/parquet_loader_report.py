"""Prints and draws the results of ``benchmark_parquet_loader.py``."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20

Row = dict[str, Any]


def rate(row: Row) -> float:
    return row["tokens"] / row["seconds"]


def spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def ratios(rows: Sequence[Row], what: str, to: str, of: Callable[[Row], float] = rate) -> list[float]:
    """Ratio of each repetition."""
    by = {(row["what"], row["repetition"]): of(row) for row in rows if row["part"] == "speed"}
    return [value / by[to, repetition] for (name, repetition), value in by.items() if name == what]


def report(rows: Sequence[Row]) -> None:
    """Print the medians."""
    speeds = [row for row in rows if row["part"] == "speed"]
    for part in ("speed", "cut"):
        for what in dict.fromkeys(row["what"] for row in rows if row["part"] == part):
            mine = [row for row in rows if (row["part"], row["what"]) == (part, what)]
            first = (
                f"  first batch {statistics.median(row['first'] for row in mine):.3f} s" if "first" in mine[0] else ""
            )
            seconds = statistics.median(row["seconds"] for row in mine)
            print(f"{what:18} {statistics.median(map(rate, mine)) / 1e6:8.2f} M tokens/s  {seconds:7.3f} s{first}")
    if speeds:
        for what, to in (
            ("loader", "library"),
            ("loader", "tokenizer"),
            ("loader", "encoder"),
            ("encoder", "library"),
            ("loader, unseen pages", "library, unseen pages"),
            ("loader, new encoder", "library, unseen pages"),
            ("library path, loader", "library path, library"),
            ("from disk", "library"),
            ("from disk", "tokenizer"),
        ):
            print(f"{what} / {to}: {spread(ratios(rows, what, to))}")
        times = ratios(rows, "loader", "loader, 6 pages", lambda row: row["seconds"] / row.get("pages", 1))
        print(f"time of a page of 24 / of a page of 6: {spread(times)}")
        of = [row["fetched"] / row["needed"] for row in speeds if row["what"] in ("loader", "loader, 6 pages")]
        print(f"bytes fetched / needed: {spread(of)}")
    if resident := [row for row in rows if row["part"] == "memory"]:
        for least in (100, resident[-1]["pages"] // 2):
            later = [row["peak"] / MIB for row in resident if row["pages"] >= least]
            print(f"resident from page {least} to {resident[-1]['pages']}: {min(later):.0f} to {max(later):.0f} MiB")
    for row in rows:
        if row["part"] == "equal":
            print(
                f"{row['what']}: {row['fetched']} differences in {row['needed'] / 1e6:.0f} MB, {row['tokens']:,} tokens"
            )


def draw(rows: Sequence[Row], folder: Path, grid: Mapping[str, Sequence[int]]) -> None:
    """Draw rates and memory, and the rates over ``grid``: values of each parameter, first the one that is kept while
    others vary."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    def tidy(axes: Any) -> None:
        axes.spines[["top", "right"]].set_visible(False)

    figure, (bars, line) = plt.subplots(1, 2, figsize=(13, 4.5), width_ratios=(3, 2))
    names = [*dict.fromkeys(row["what"] for row in rows if row["part"] == "speed")]
    middle = [
        statistics.median(rate(row) / 1e6 for row in rows if (row["part"], row["what"]) == ("speed", name))
        for name in names
    ]
    order = sorted(range(len(names)), key=middle.__getitem__)
    bars.bar_label(bars.barh([names[i] for i in order], [middle[i] for i in order]), fmt="%.1f", padding=3)
    bars.set_xlabel("million tokens per second, median")
    resident = [row for row in rows if row["part"] == "memory"]
    line.plot([row["pages"] for row in resident], [row["peak"] / MIB for row in resident])
    line.set_xlabel("pages read")
    line.set_ylabel("resident memory, MiB")
    line.set_ylim(bottom=0)
    for axes in (bars, line):
        tidy(axes)
    figure.tight_layout()
    figure.savefig(folder / "parquet_loader.png", dpi=110)

    cells = [row for row in rows if row["part"] == "grid"]
    if not cells:
        return
    figure, axes = plt.subplots(1, 1 + len(grid), figsize=(18, 3.6), width_ratios=(2, *(1 for _ in grid)))
    pages, requests = sorted(grid["pages"]), sorted(grid["requests"])

    def median(**wanted: int) -> float:
        cell = {name: values[0] for name, values in grid.items()} | wanted
        return statistics.median(
            rate(row) / 1e6 for row in cells if all(row[name] == value for name, value in cell.items())
        )

    heat = [[median(pages=p, requests=r) for p in pages] for r in requests]
    axes[0].imshow(heat, aspect="auto", cmap="Blues", vmin=0, vmax=1.5 * max(map(max, heat)))
    for y, x in itertools.product(range(len(requests)), range(len(pages))):
        axes[0].text(x, y, f"{heat[y][x]:.1f}", ha="center", va="center", color="black")
    axes[0].set_xticks(range(len(pages)), pages)
    axes[0].set_yticks(range(len(requests)), requests)
    axes[0].set_xlabel("pages")
    axes[0].set_ylabel("concurrent requests")
    axes[0].set_title("million tokens per second")
    for place, (name, values) in zip(axes[1:], grid.items(), strict=True):
        place.bar([str(value) for value in sorted(values)], [median(**{name: value}) for value in sorted(values)])
        place.set_xlabel({"length": "sequence length", "batch": "batch size", "ahead": "pages ahead"}.get(name, name))
        place.set_ylim(0, 1.1 * max(map(max, heat)))
        tidy(place)
    figure.tight_layout()
    figure.savefig(folder / "parquet_loader_grid.png", dpi=110)

"""Prints and draws the results of ``benchmark_parquet_loader.py``."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

MIB = 2**20

Row = dict[str, Any]


def rate(row: Row) -> float:
    return row["tokens"] / row["seconds"]


def spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def ratios(rows: Sequence[Row], what: str, to: str, of: Callable[[Row], float] = rate) -> list[float]:
    """Return the ratio of each repetition."""
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

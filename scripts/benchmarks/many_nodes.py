"""Reports memory and processor time of each process of a localnet, from its folder.

    tplr localnet --small --share-imports --miners 24 --validators 3 --windows 20 --window-seconds 40 \\
        --vocab-size 1024 --run-dir FOLDER
    python scripts/benchmarks/many_nodes.py FOLDER

Writes ``docs/benchmarks/many_nodes.csv``, a row for each process after the last window, and prints a table of kinds of
processes. Processor time of a window is the mean over the second half of the run.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

MB = 1e6
TARGET = Path(__file__).parents[2] / "docs" / "benchmarks" / "many_nodes.csv"
COLUMNS: Sequence[str] = ("process", "rss_MB", "pss_MB", "uss_MB", "cpu_s", "cpu_s_per_window")
KINDS = ("miner", "validator", "aggregator", "storage", "fork-server", "localnet")


def rows_of(folder: Path) -> list[dict[str, str | float]]:
    """Return one row for each process, as of the last window."""
    with (folder / "usage.csv").open() as file:
        samples = list(csv.DictReader(file))
    windows = sorted({int(row["windows"]) for row in samples})
    last, middle = windows[-1], windows[len(windows) // 2]
    at = {(row["name"], int(row["windows"])): row for row in samples}
    found: list[dict[str, str | float]] = []
    for row in (one for one in samples if int(one["windows"]) == last):
        before = at[row["name"], middle]
        found.append(
            {
                "process": row["name"],
                **{f"{name}_MB": round(int(row[name]) / MB, 1) for name in ("rss", "pss", "uss")},
                "cpu_s": float(row["cpu"]),
                "cpu_s_per_window": round((float(row["cpu"]) - float(before["cpu"])) / (last - middle), 2),
            }
        )
    return found


def table(rows: list[dict[str, str | float]]) -> str:
    """Return the means by kind of process, as Markdown."""
    lines = [
        "| process | number | resident, MB | share of what is shared included (PSS), MB | its own (USS), MB "
        "| processor, s a window |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        mine = [row for row in rows if str(row["process"]).split("-")[0] == kind or row["process"] == kind]
        if mine:
            cells = [f"{mean(float(row[name]) for row in mine):.0f}" for name in ("rss_MB", "pss_MB", "uss_MB")]
            cpu = mean(float(row["cpu_s_per_window"]) for row in mine)
            lines.append(f"| {kind} | {len(mine)} | {' | '.join(cells)} | {cpu:.2f} |")
    total, cpu = (sum(float(row[name]) for row in rows) for name in ("pss_MB", "cpu_s_per_window"))
    lines.append(f"| all | {len(rows)} | | {total:,.0f} | | {cpu:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    rows = rows_of(parser.parse_args().folder)
    with TARGET.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))


if __name__ == "__main__":
    main()

"""Measures whether nodes grow: resident memory and open files of each process of a localnet, once a window.

    python scripts/benchmarks/long_run.py --windows 200 --run-dir FOLDER   # 25 minutes
    python scripts/benchmarks/long_run.py                                  # table and picture again, from the CSV

Writes ``docs/benchmarks/long_run.csv``, ``.png`` and ``.md``: for each node the growth between the end of the first
``PLATEAU`` windows, which fill caches, and the last window, on a line through all windows between them (Theil and Sen:
the median of the slopes between all pairs, so single peaks of the allocator do not count). At most 2 % is allowed of
memory. Of open files, a node keeps connections for ten seconds: their number follows how many requests it once sends at
the same time, so the table has the most open in each half.
"""

import argparse
import asyncio
import csv
import itertools
import statistics
from pathlib import Path

from pictures import redraw

from tplr.localnet.plan import make_plan
from tplr.localnet.supervisor import Localnet

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
PLATEAU = 60  # windows
LIMIT = 0.02
WINDOW_SECONDS = 7.5
STEPS = (
    "They are connections to the storage, each kept for ten seconds after its last request, which is longer than "
    "a window: as many as a node sends requests at once in any part of a window. From "
    "`gradient_retention_windows` (here 100) windows after the start, a node also deletes in each window what is "
    "older than that, up to 16 objects at once: that is the step of three after 97 windows. In a run with 45 "
    "instead of 100, in which the miner missed some windows, the validator's median rises from 4 to 5 after 45 "
    "windows, all of it in connections to the storage; a node's other open files stay 10 or 11."
)

Rows = list[dict[str, str]]  # as the CSV has them


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def open_files(pid: int) -> int:
    """Open file descriptors of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def measure(windows: int, run_dir: Path) -> Rows:
    """One row for each node and window that all have completed."""
    plan = make_plan(miners=1, windows=windows, window_seconds=WINDOW_SECONDS, vocab_size=512, run_dir=run_dir)
    rows: Rows = []
    async with Localnet(plan) as net:
        done = 0
        while done < windows:
            view = await net.wait_until(lambda view, done=done: view.completed > done, timeout=120)
            done = view.completed  # on a busy machine a look may find several new windows
            for name, child in (*net.nodes.items(), ("storage", net.storage)):
                if child.running and child.pid:
                    size, files = resident_bytes(child.pid), open_files(child.pid)
                    figures = {"window": done, "resident_bytes": size, "open_files": files}
                    rows.append({"node": name} | {key: str(value) for key, value in figures.items()})
    return rows


def growth(rows: Rows, node: str, field: str) -> tuple[float, float]:
    """Values on the line after the plateau, and at the end."""
    points = [(int(row["window"]), float(row[field])) for row in _after_plateau(rows, node)]
    slope = statistics.median(
        (after - before) / (late - early) for (early, before), (late, after) in itertools.combinations(points, 2)
    )
    start = statistics.median(value - slope * (window - PLATEAU) for window, value in points)
    return start, start + slope * (points[-1][0] - PLATEAU)


def most_open_files(rows: Rows, node: str) -> tuple[int, int]:
    """In the first and in the second half after the plateau."""
    counts = [int(row["open_files"]) for row in _after_plateau(rows, node)]
    half = len(counts) // 2
    return max(counts[:half]), max(counts[half:])


def _after_plateau(rows: Rows, node: str) -> Rows:
    return [row for row in rows if row["node"] == node and int(row["window"]) >= PLATEAU]


def report(rows: Rows) -> tuple[str, bool]:
    """The table, and whether nothing grew by more than the limit."""
    windows = max(int(row["window"]) for row in rows)
    lines = [
        f"A localnet of a miner, a validator and an aggregator over {windows} windows of {WINDOW_SECONDS} s "
        f"(`scripts/benchmarks/long_run.py`): after {PLATEAU} windows, and at the end, on a line through all between.",
        "",
        "| node | memory after the plateau, MB | at the end | growth | most open files, first half | second half |",
        "|---|---|---|---|---|---|",
    ]
    passed = True
    nodes = list(dict.fromkeys(row["node"] for row in rows))
    for node in nodes:
        before, after = growth(rows, node, "resident_bytes")
        passed &= after / before - 1 <= LIMIT
        files = most_open_files(rows, node)
        lines.append(
            f"| {node} | {before / 1e6:.1f} | {after / 1e6:.1f} | {after / before - 1:+.1%} | {files[0]} | {files[1]} |"
        )
    on_line = {node: growth(rows, node, "open_files") for node in nodes}
    steps = ", ".join(f"{node} {before:.1f} to {after:.1f}" for node, (before, after) in on_line.items())
    lines += [
        "",
        f"Open files on a line as for memory: {steps}. {STEPS}",
    ]
    lines += ["", f"Memory grows by at most {LIMIT:.0%}: {'yes' if passed else 'NO'}."]
    return "\n".join(["# A long run", "", *lines, "", "![memory over windows](long_run.png)", ""]), passed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--run-dir", type=Path, help="new folder of the run; without: report the CSV again")
    args = parser.parse_args()
    path = FOLDER / "long_run.csv"
    if args.run_dir:
        rows = asyncio.run(measure(args.windows, args.run_dir))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["node", "window", "resident_bytes", "open_files"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    else:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    redraw("long_run")
    text, passed = report(rows)
    (FOLDER / "long_run.md").write_text(text)
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())

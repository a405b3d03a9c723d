"""Measures whether nodes grow: resident memory and open files of each process of a localnet, once a window.

    python scripts/benchmarks/long_run.py --windows 200   # 25 minutes

Writes ``docs/benchmarks/long_run.csv``, ``.png`` and ``.md``: for each node the growth between the end of the first
``PLATEAU`` windows, which fill caches, and the last window, on a line through all windows between them (Theil and Sen:
the median of the slopes between all pairs, so single peaks of the allocator do not count). At most 2 % is allowed.
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


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def open_files(pid: int) -> int:
    """Open file descriptors of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def measure(windows: int, run_dir: Path) -> list[dict[str, object]]:
    """One row for each node and window that all have completed."""
    plan = make_plan(miners=1, windows=windows, window_seconds=7.5, vocab_size=512, run_dir=run_dir)
    rows: list[dict[str, object]] = []
    async with Localnet(plan) as net:
        done = 0
        while done < windows:
            view = await net.wait_until(lambda view, done=done: view.completed > done, timeout=120)
            done = view.completed  # on a busy machine a look may find several new windows
            for name, child in (*net.nodes.items(), ("storage", net.storage)):
                if child.running and child.pid:
                    size, files = resident_bytes(child.pid), open_files(child.pid)
                    rows.append({"node": name, "window": done, "resident_bytes": size, "open_files": files})
    return rows


def growth(rows: list[dict[str, object]], node: str, field: str) -> tuple[float, float]:
    """Values on the line after the plateau, and at the end."""
    points = [
        (int(str(row["window"])), float(str(row[field])))
        for row in rows
        if row["node"] == node and int(str(row["window"])) >= PLATEAU
    ]
    slope = statistics.median(
        (after - before) / (late - early) for (early, before), (late, after) in itertools.combinations(points, 2)
    )
    start = statistics.median(value - slope * (window - PLATEAU) for window, value in points)
    return start, start + slope * (points[-1][0] - PLATEAU)


def report(rows: list[dict[str, object]]) -> tuple[str, bool]:
    """The table, and whether nothing grew by more than the limit."""
    windows = max(int(str(row["window"])) for row in rows)
    lines = [
        f"A localnet of a miner, a validator and an aggregator over {windows} windows "
        f"(`scripts/benchmarks/long_run.py`): after {PLATEAU} windows, and at the end, on a line through all between.",
        "",
        "| node | memory after the plateau, MB | at the end | growth | open files | at the end |",
        "|---|---|---|---|---|---|",
    ]
    passed = True
    for node in dict.fromkeys(str(row["node"]) for row in rows):
        before, after = growth(rows, node, "resident_bytes")
        files_before, files_after = growth(rows, node, "open_files")
        passed &= after / before - 1 <= LIMIT and files_after / files_before - 1 <= LIMIT
        lines.append(
            f"| {node} | {before / 1e6:.1f} | {after / 1e6:.1f} | {after / before - 1:+.1%} "
            f"| {files_before:.1f} | {files_after:.1f} |"
        )
    return "\n".join(["# A long run", "", *lines, "", "![memory over windows](long_run.png)", ""]), passed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--run-dir", type=Path, required=True, help="new folder of the run")
    args = parser.parse_args()
    rows = asyncio.run(measure(args.windows, args.run_dir))
    with (FOLDER / "long_run.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["node", "window", "resident_bytes", "open_files"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    redraw("long_run")
    text, passed = report(rows)
    (FOLDER / "long_run.md").write_text(text)
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())

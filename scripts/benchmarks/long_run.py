"""Measures growth of nodes: resident memory and open files of each process of a localnet, once per window.

    python scripts/benchmarks/long_run.py --windows 200 --run-dir FOLDER   # 25 minutes
    python scripts/benchmarks/long_run.py                                  # table and picture again, from the CSV

Writes ``docs/benchmarks/long_run.csv``, ``.png`` and ``.md``: for each node the growth between its plateau and the last
window, on a line fitted to all windows between them; the limit is 2 %. Memory is on its plateau when the first windows
have filled caches; the line is that of Theil and Sen, the median of the slopes between all pairs, so single peaks of
the allocator do not count. Open files are on their plateau when each window also deletes objects older than
``gradient_retention_windows``; they are small counts, so the line is a least-squares fit.
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
PLATEAU = {"resident_bytes": 60, "open_files": 100}  # windows; the second is gradient_retention_windows
LIMIT = 0.02
WINDOW_SECONDS = 7.5
CONNECTIONS = (
    "Open files that come and go are connections to the storage, each kept for ten seconds after its last request, "
    "which is longer than a window: as many as a node sends requests at once in any part of a window. From "
    "`gradient_retention_windows` on, a node also deletes in each window what is older than that, up to 16 objects at "
    "once: until then the validator has three fewer. In a run with 45 instead of 100, in which the miner missed some "
    "windows, the validator's median rises from 4 to 5 after 45 windows, all of it in connections to the storage; a "
    "node's other open files stay 10 or 11."
)

Rows = list[dict[str, str]]  # rows of the CSV


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def open_files(pid: int) -> int:
    """Return the number of open file descriptors of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def measure(windows: int, run_dir: Path) -> Rows:
    """Run a localnet; return one row for each node and each window that all nodes have completed."""
    plan = make_plan(miners=1, windows=windows, window_seconds=WINDOW_SECONDS, vocab_size=512, run_dir=run_dir)
    rows: Rows = []
    async with Localnet(plan) as net:
        done = 0
        while done < windows:
            view = await net.wait_until(lambda view, done=done: view.completed > done, timeout=120)
            done = view.completed  # on a busy machine one poll may find several new windows
            for name, child in (*net.nodes.items(), ("storage", net.storage)):
                if child.running and child.pid:
                    size, files = resident_bytes(child.pid), open_files(child.pid)
                    figures = {"window": done, "resident_bytes": size, "open_files": files}
                    rows.append({"node": name} | {key: str(value) for key, value in figures.items()})
    return rows


def growth(rows: Rows, node: str, field: str) -> tuple[float, float]:
    """Return the values of the fitted line at the plateau and at the end."""
    points = [
        (int(row["window"]), float(row[field]))
        for row in rows
        if row["node"] == node and int(row["window"]) >= PLATEAU[field]
    ]
    windows, values = zip(*points, strict=True)
    if field == "open_files":
        slope, zero = statistics.linear_regression(windows, values)
        return zero + slope * windows[0], zero + slope * windows[-1]
    slope = statistics.median(
        (after - before) / (late - early) for (early, before), (late, after) in itertools.combinations(points, 2)
    )
    start = statistics.median(value - slope * (window - windows[0]) for window, value in points)
    return start, start + slope * (windows[-1] - windows[0])


def report(rows: Rows) -> tuple[str, bool]:
    """Return the table, and whether all growth is within the limit."""
    windows = max(int(row["window"]) for row in rows)
    memory, files = PLATEAU.values()
    lines = [
        f"A localnet of a miner, a validator and an aggregator over {windows} windows of {WINDOW_SECONDS} s "
        f"(`scripts/benchmarks/long_run.py`): memory after {memory} windows, when caches are full, open files after "
        f"{files}, when each window also deletes old objects; and both at the end, on a line through all between.",
        "",
        "| node | memory, MB | at the end | growth | open files | at the end | growth |",
        "|---|---|---|---|---|---|---|",
    ]
    passed = True
    for node in dict.fromkeys(row["node"] for row in rows):
        cells = [node]
        for field, unit in (("resident_bytes", 1e6), ("open_files", 1)):
            before, after = growth(rows, node, field)
            passed &= after / before - 1 <= LIMIT
            cells += [f"{before / unit:.1f}", f"{after / unit:.1f}", f"{after / before - 1:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", CONNECTIONS]
    lines += ["", f"Both grow by at most {LIMIT:.0%}: {'yes' if passed else 'NO'}."]
    return "\n".join(
        ["# A long run", "", *lines, "", "![memory and open files over windows](long_run.png)", ""]
    ), passed


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

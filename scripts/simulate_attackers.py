"""Measures the pay of each attack, with real training of a small model and the nodes' own code.

    python scripts/simulate_attackers.py [--seeds 8] [--jobs 2] [--schemes muon demo sparseloco]
                                         [--vocabularies 1024 256] [--scenarios NAME ...]
                                         [--results FILE] [--finished] [--write]

Runs the scenarios of ``tplr.localnet.scenarios``, one process per job, and prints the table of median and worst over
the seeds for each scheme and vocabulary. ``--write`` writes it into ``docs/attack_table.md``, and those cells that
``docs/attackers.md`` quotes into that page; cells without a new result keep their values, so the table can be made in
parts. Results are appended to ``--results`` as they arrive, and a run with the same file continues after them;
``--finished`` runs no scenarios and only uses existing results. The exit status is 1 if a target of
``tplr.localnet.targets`` is missed. The seed determines the sampled pages; a vocabulary of 256 means single bytes.
"""

import argparse
import itertools
import json
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from tplr.localnet.scenarios import SCENARIOS, Figures, Setting
from tplr.localnet.simulation import SINGLE_BYTES, VOCABULARY
from tplr.localnet.targets import TARGETS, missed

DOCS = Path(__file__).parents[1] / "docs"
TABLE = DOCS / "attack_table.md"
PAGE = DOCS / "attackers.md"  # quotes cells of ``QUOTED``: <!-- figure -->text<!-- -->
QUOTED = "muon, 1024"
QUOTE = re.compile(r"<!-- (?P<figure>[^>]+) -->[^<]*<!-- -->")
RESULTS = DOCS / "benchmarks" / "attackers.jsonl"
BEGIN, END = "<!-- table -->\n", "<!-- end -->\n"
Column = tuple[str, int]  # scheme and vocabulary
Cells = dict[str, dict[str, str]]  # text by figure and heading of a column
TARGET_OF = {target.figure: target for target in TARGETS}


def run(name: str, setting: Setting) -> Figures:
    """Return the figures of a scenario; runs in a separate process."""
    torch.set_num_threads(1)  # much faster than several threads for such a small model
    logging.disable(logging.WARNING)  # one warning for each refused update
    return SCENARIOS[name].figures(setting)


def load(path: Path) -> dict[tuple[str, Setting], Figures]:
    """Return the results so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for line in lines:
        one = json.loads(line)
        found[one["scenario"], Setting(one["scheme"], one["vocabulary"], one["seed"])] = one["figures"]
    return found


def save(path: Path, name: str, setting: Setting, figures: Figures) -> None:
    """Append a result."""
    line = {"scenario": name, "scheme": setting.scheme, "vocabulary": setting.vocabulary, "seed": setting.seed}
    with path.open("a") as file:
        file.write(json.dumps({**line, "figures": figures}) + "\n")


def run_all(tasks: Sequence[tuple[str, Setting]], jobs: int, results: Path) -> None:
    """Run tasks in processes, in order, and report progress."""
    whole, done, began = sum(SCENARIOS[name].cost for name, _ in tasks), 0.0, time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, *task): task for task in tasks}
        for future in as_completed(running):
            name, setting = running[future]
            save(results, name, setting, future.result())
            done += SCENARIOS[name].cost
            left = (time.monotonic() - began) * (whole / done - 1)
            where = f"{setting.scheme}, vocabulary {setting.vocabulary}, seed {setting.seed}"
            print(f"{name}: {where}; {done / whole:.0%}, {left / 60:.0f} minutes left", flush=True)


def measured(runs: Mapping[Column, Sequence[Figures]]) -> Cells:
    """Return the table's cells for the figures of ``runs``: median and worst."""
    cells: Cells = {}
    for (scheme, vocabulary), found in runs.items():
        for name in dict.fromkeys(name for figures in found for name in figures):
            text = cell(name, [one[name] for one in found if name in one])
            cells.setdefault(name, {})[f"{scheme}, {vocabulary}"] = text
    return cells


def published(text: str) -> Cells:
    """Return the cells of the table in ``text``, a page of the docs."""
    rows = [line.strip("| ").split(" | ") for line in text.partition(BEGIN)[2].partition(END)[0].splitlines()]
    if len(rows) < 2:
        return {}
    columns = rows[0][1:-1]
    return {row[0]: dict(zip(columns, row[1:], strict=False)) for row in rows[2:]}


def table(cells: Cells) -> list[str]:
    """Return lines of Markdown: a row for each figure, a column for each scheme and vocabulary, by scheme."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    schemes = list(dict.fromkeys(column.partition(",")[0] for column in columns))
    columns.sort(key=lambda column: schemes.index(column.partition(",")[0]))
    lines = [f"| {' | '.join(['figure', *columns, 'target'])} |", f"|{'---|' * (len(columns) + 2)}"]
    for name, row in cells.items():
        lines.append(f"| {' | '.join([name, *(row.get(column, '-') for column in columns), bounds(name)])} |")
    return lines


def cell(name: str, values: Sequence[float]) -> str:
    """Return a figure's median and worst, in bold if it misses its target; without a target, median, least, largest."""
    if not (target := TARGET_OF.get(name)):
        return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    text = "{:.2f}, {:.2f}".format(*target.reached(values))
    return text if target.met(values) else f"**{text}**"


def bounds(name: str) -> str:
    """Return the target of a figure."""
    if not (target := TARGET_OF.get(name)):
        return ""
    return f"{'≥' if target.least else '≤'} {target.median:g}, {target.worst:g}"


def write(cells: Cells) -> None:
    """Update the table in the docs and the quotes of it; cells without a result and all other text stay unchanged."""
    text = TABLE.read_text()
    updated = published(text)
    for name, row in cells.items():
        updated.setdefault(name, {}).update(row)
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    TABLE.write_text(f"{before}{BEGIN}" + "\n".join(table(updated)) + f"\n{end}{after}")
    PAGE.write_text(quoting(PAGE.read_text(), updated))


def quoting(text: str, cells: Cells) -> str:
    """Return ``text`` with each quoted cell as it is in ``cells``. Raises KeyError if a figure has no row."""
    return QUOTE.sub(lambda found: f"<!-- {found['figure']} -->{cells[found['figure']][QUOTED]}<!-- -->", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--schemes", nargs="+", default=["muon", "demo", "sparseloco"])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[VOCABULARY, SINGLE_BYTES])
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=[*SCENARIOS])
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, one for each run of a scenario")
    parser.add_argument("--finished", action="store_true", help="run nothing, and take the results that are there")
    parser.add_argument(
        "--write",
        action="store_true",
        help="update the table in docs/attack_table.md and what docs/attackers.md quotes",
    )
    given = parser.parse_args()
    results = given.results
    columns = [*itertools.product(given.schemes, given.vocabularies)]
    # Seed by seed, so that an interrupted run leaves complete seeds.
    settings = [Setting(*column, seed) for seed in range(given.seeds) for column in columns]
    tasks = [
        (name, setting)
        for setting in settings
        for name in given.scenarios
        if SCENARIOS[name].single_bytes or setting.vocabulary != SINGLE_BYTES
    ]
    done = load(results)
    if given.finished:
        tasks = [task for task in tasks if task in done]
    run_all([task for task in tasks if task not in done], given.jobs, results)
    done = load(results)
    runs: dict[Column, list[Figures]] = {column: [] for column in columns}
    for name, setting in tasks:
        runs[setting.scheme, setting.vocabulary].append(done[name, setting])
    runs = {column: found for column, found in runs.items() if found}
    cells = measured(runs)
    print("\n".join(table(cells)))
    if given.write:
        write(cells)
    failures = [f"{scheme}, {size}: {line}" for (scheme, size), found in runs.items() for line in missed(found)]
    print("\n".join(["targets missed:", *failures] if failures else ["all targets met"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

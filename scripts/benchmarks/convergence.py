"""How well each scheme learns for the bytes it sends: simulated peers in one process, the real code of updates.

All methods get the same first weights, the same batches and the same number of tokens, for each seed:

- ``adamw``: AdamW on the mean gradient of all peers' batches, as one machine with the summed batch would do; a peer
  that took part in it would send its whole gradient, in float32, in every step.
- ``diloco``: H inner AdamW steps on each peer, the mean of the float32 differences, outer SGD with Nesterov momentum
  of 0.9, as published.
- ``averaging``: the same without outer momentum.
- ``sparseloco``: the package's own, over ``k`` of 4096 and bits a value.
- ``muon``, ``muon-averaging``, ``muon-sparseloco``: ``adamw``, ``averaging`` and ``sparseloco`` with Muon for hidden
  matrices, and AdamW for the rest.
- ``muon-grouped``: ``muon-sparseloco`` that sends one entry of each of k groups of a chunk.
- ``demo``: the package's own; every window has two or three batches of each peer.

Before that each method gets trials of its learning rates (``TRIALS``, and those of the grid), with a seed of their own;
the best one is used for all its cells.

    python scripts/benchmarks/convergence.py --reduced     # about an hour on 2 cores
    python scripts/benchmarks/convergence.py               # a day
    python scripts/benchmarks/convergence.py --grid reduced-16     # 16 peers instead of 4, with the rates found for 8
    python scripts/benchmarks/convergence.py --grid gpu --device cuda --text FOLDER ...    # 117M parameters

Appends each finished cell to ``docs/benchmarks/convergence.csv`` (and the loss along the first seed's final cells to
``convergence_curves.csv``), and skips those that are there, so it can be stopped and started at will. Then it prints
the table and draws the pictures. ``--report`` does only that.
"""

import argparse
import csv
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a cell is a process, and there are as many as cores

from convergence_cell import Machine, Row, run_cell
from convergence_grid import GRIDS, METHODS, Cell, best_finals, best_settings, finals, trials
from convergence_text import load_tokens
from pictures import redraw

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "convergence.csv"
COLUMNS = (
    "grid", "purpose", "method", "k", "bits", "settings", "seed",
    "loss", "bytes_per_peer", "parameters", "tokens", "seconds",
)  # fmt: skip
CURVE_COLUMNS = (*COLUMNS[:7], "rounds", "tokens", "bytes_per_peer", "loss")
SMALL = 150  # an update is one of so many parts of DiLoCo's, for the verdict


def identity(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[column]) for column in COLUMNS[:7])


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run_cells(cells: list[Cell], path: Path, machine: Machine, jobs: int) -> None:
    """Run the cells that are not in ``path`` yet, and append each when it is done."""
    for row, curve in run_missing(cells, path, machine, jobs):
        append(path, COLUMNS, [row])
        append(curves_of(path), CURVE_COLUMNS, curve)
        label = f"{row['purpose']} {row['method']} k={row['k']} bits={row['bits']} {row['settings']}"
        print(f"{label} seed {row['seed']}: {row['loss']} in {row['seconds']} s", flush=True)


def run_missing(cells: list[Cell], path: Path, machine: Machine, jobs: int) -> Iterator[tuple[Row, list[Row]]]:
    """Rows and curves of the cells that have no row in ``path``."""
    done = {identity(row) for row in read_rows(path)}
    left = [cell for cell in cells if identity(asdict(cell)) not in done]
    print(f"{len(cells) - len(left)} of {len(cells)} cells are done", flush=True)
    if not left:
        return
    load_tokens(GRIDS[left[0].grid], machine.text)  # once, before there are processes
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(partial(run_cell, machine=machine), cell) for cell in left]
        for number, future in enumerate(as_completed(futures), 1):
            found = future.result()
            print(f"{number}/{len(left)}", end=" ")
            yield found


def curves_of(path: Path) -> Path:
    """Return the file of curves that belongs to a file of results."""
    return path.with_name(f"{path.stem}_curves.csv")


def append(path: Path, columns: tuple[str, ...], rows: list[Row]) -> None:
    """Append rows to a CSV; a new one begins with the columns' names."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


@dataclass(frozen=True)
class Result:
    """One method's final losses, by seed."""

    label: str
    losses: dict[int, float]
    bytes_per_peer: int
    bits_per_parameter: float  # of one update

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses.values())

    @property
    def spread(self) -> float:
        """Standard deviation over seeds."""
        return spread(list(self.losses.values()))

    def gaps(self, other: "Result") -> list[float]:
        """How much higher the loss is than another method's, seed by seed."""
        return [self.losses[seed] - other.losses[seed] for seed in sorted(self.losses.keys() & other.losses.keys())]


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def summarize(rows: list[dict[str, str]], name: str) -> dict[str, Result]:
    """All finished cells with each method's best settings by label, the lowest loss first."""
    found: dict[tuple[str, int, int], dict[int, Mapping[str, str]]] = {}
    for row in best_finals(rows, name):
        place = (row["method"], int(row["k"]), int(row["bits"]))
        found.setdefault(place, {})[int(row["seed"])] = row
    grid, results = GRIDS[name], []
    for (method, k, bits), by_seed in found.items():
        label = f"{method} k={k}, {f'{bits} bits' if bits else 'float32'}" if k else method
        one = next(iter(by_seed.values()))
        updates = {"adamw": grid.steps, "muon": grid.steps, "demo": grid.steps // grid.demo_batches}.get(
            method, grid.rounds
        )
        losses = {seed: float(row["loss"]) for seed, row in by_seed.items()}
        sent = int(one["bytes_per_peer"])
        results.append(Result(label, losses, sent, 8 * sent / updates / int(one["parameters"])))
    return {one.label: one for one in sorted(results, key=lambda result: result.mean)}


def print_table(results: dict[str, Result]) -> None:
    if not {"diloco", "adamw"} <= results.keys():
        print("no table yet: it compares with diloco and adamw")
        return
    diloco, adamw = results["diloco"], results["adamw"]
    columns = ("method", "final loss (mean ± sd over seeds)", "gap to DiLoCo, same seed", "closes of DiLoCo's to adamw")
    print("|", " | ".join((*columns, "MB sent a peer", "of DiLoCo's", "bits a parameter, an update")), "|")
    print("|---|---|---|---|---|---|---|")
    for one in results.values():
        gaps = one.gaps(diloco)
        same = replace(adamw, losses={seed: adamw.losses[seed] for seed in one.losses})
        closed = statistics.mean(gaps) / statistics.mean(same.gaps(diloco))
        print(
            f"| {one.label} | {one.mean:.3f} ± {one.spread:.3f} | {statistics.mean(gaps):+.3f} ± {spread(gaps):.3f} "
            f"| {closed:.0%} | {one.bytes_per_peer / 1e6:.2f} "
            f"| 1/{diloco.bytes_per_peer / one.bytes_per_peer:.3g} | {one.bits_per_parameter:.3f} |"
        )


def print_verdicts(results: dict[str, Result]) -> None:
    """What the benchmark is for, in three lines."""
    diloco = results.get("diloco")
    small = [
        one
        for one in results.values()
        if diloco and " k=" in one.label and one.bytes_per_peer * SMALL < diloco.bytes_per_peer
    ]
    if not small:
        return
    best = min(small, key=lambda one: one.mean)
    for other in [one for one in ("diloco", "averaging", "adamw") if one in results]:
        gaps = best.gaps(results[other])
        gap, margin = statistics.mean(gaps), spread(gaps)
        verdict = "lower" if gap < -margin else "higher" if gap > margin else "the same within the spread of seeds"
        share = results[other].bytes_per_peer / best.bytes_per_peer
        print(f"{best.label}, 1/{share:.3g} of the bytes of {other}: loss {gap:+.3f} ± {margin:.3f}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=GRIDS, default="full", help="default: %(default)s")
    parser.add_argument("--reduced", dest="grid", action="store_const", const="reduced", help="as --grid reduced")
    parser.add_argument("--report", action="store_true", help="only the table and the picture of what is there")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help="of the final cells (default: all of the grid)")
    parser.add_argument("--device", default="cpu", help="device of PyTorch (default: %(default)s)")
    parser.add_argument("--text", type=Path, nargs="+", default=(), help="folders of text instead of localnet's corpus")
    parser.add_argument("--jobs", type=int, help="cells at a time (default: one a core; one on a GPU)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV to append to (default: %(default)s)")
    given = parser.parse_args()
    name, wanted = given.grid, set(given.methods)
    machine = Machine(given.device, tuple(given.text))
    jobs = given.jobs or (os.cpu_count() if given.device == "cpu" else 1) or 1
    if not given.report:
        run_cells([one for one in trials(name) if one.method in wanted], given.results, machine, jobs)
        best = best_settings(read_rows(given.results), name)
        seeds = given.seeds or range(GRIDS[name].seeds)
        final = [one for one in finals(name, best) if one.method in wanted and one.seed in seeds]
        run_cells(final, given.results, machine, jobs)
    rows = read_rows(given.results)
    print("settings found:", json.dumps({m: json.loads(s) for m, s in best_settings(rows, name).items()}))
    results = summarize(rows, name)
    print_table(results)
    print_verdicts(results)
    redraw("convergence", given.results)
    redraw("convergence_curves", curves_of(given.results))


if __name__ == "__main__":
    main()

"""Measures who takes the own-pages tests, and what own-pages factors follow, for two rules of the draw.

    python scripts/benchmarks/own_pages_draw.py

The draw, the doubt and the factor are the nodes' code; the indicators are synthetic. A miner whose mean indicator is
``m`` has the indicators ``2 F(z + d) - 1`` of independent normal ``z``, with the normal distribution F and the ``d``
for which their mean is ``m``. For m = 0 they are uniform in [-1, 1], as those of a miner that trained elsewhere. The
networks are that of ``simulate_attackers.py``'s crowd, with the mean indicators of docs/benchmarks/scoring.md, and one
of honest miners alone. Writes ``docs/benchmarks/own_pages_draw.csv`` and prints its table.
"""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tplr.hparams import load_hparams
from tplr.scoring.measures import own_pages_doubt, own_pages_factor
from tplr.scoring.selection import sample_evaluated

TABLE = Path(__file__).parents[2] / "docs" / "benchmarks" / "own_pages_draw.csv"
WINDOWS, SEEDS = 120, 40
TURNS = 60
HPARAMS = load_hparams()
ELSEWHERE = "trained elsewhere"
NORMAL = statistics.NormalDist()


class Kind(NamedTuple):
    """A number of miners with a mean indicator, and whether their updates help, so that they can be paid."""

    miners: int
    mean: float
    helps: bool = True


# Cheats that help: three copiers, a repeater and one of wrong pages. Cheats that don't: random values, flipped signs,
# noise else, poison else, and two that are out of sync.
CHEATS = {ELSEWHERE: Kind(5, 0.0), "does not help": Kind(6, 0.0, helps=False)}
NETWORKS: dict[str, dict[str, Kind]] = {
    "crowd, Muon": {
        "8": Kind(1, 0.62), "24": Kind(5, 0.97), "64": Kind(1, 0.99), "overfitter": Kind(1, 0.97), **CHEATS
    },
    "crowd, SparseLoCo": {
        "8": Kind(1, 0.49), "24": Kind(5, 0.86), "64": Kind(1, 0.97), "overfitter": Kind(1, 0.57), **CHEATS
    },
    "crowd, Muon, single bytes": {
        "8": Kind(1, 0.41), "24": Kind(5, 0.86), "64": Kind(1, 0.92), "overfitter": Kind(1, 0.49), **CHEATS
    },
    "honest, SparseLoCo": {"8": Kind(6, 0.49), "24": Kind(8, 0.86), "64": Kind(1, 0.97)},
}  # fmt: skip


def by_waiting(_tests: Sequence[float], _helps: bool) -> float:
    return 1.0


def by_doubt(tests: Sequence[float], helps: bool) -> float:
    return own_pages_doubt(tests) if helps else 0.0


Rule = Callable[[Sequence[float], bool], float]
RULES: dict[str, Rule] = {"waiting": by_waiting, "waiting and doubt": by_doubt}


def simulate(
    network: Mapping[str, Kind], rule: Rule, seed: int, *, windows: int, turns: int | None = None
) -> Iterator[tuple[list[str], list[list[float]]]]:
    """Yield after every window the miners' kinds, and the indicators of each in the last ``pay_windows`` windows.

    Args:
        turns: window from which on the first miner of 24 sequences trains elsewhere.
    """
    random, span = np.random.default_rng(seed), HPARAMS.pay_windows
    kinds = [name for name, kind in network.items() for _ in range(kind.miners)]
    shift = [math.sqrt(2) * NORMAL.inv_cdf((network[name].mean + 1) / 2) for name in kinds]
    tests: list[dict[int, float]] = [{} for _ in kinds]
    for window in range(windows):
        if window == turns:
            shift[kinds.index("24")] = 0.0
        recent = [[one for when, one in of.items() if when > window - span] for of in tests]
        waited = {uid: min(window - max(of), span) if of else span for uid, of in enumerate(tests)}
        doubts = {uid: rule(of, network[kinds[uid]].helps) for uid, of in enumerate(recent)}
        for uid in sample_evaluated(waited, doubts, count=HPARAMS.uids_per_window, seed=seed * windows + window):
            tests[uid][window] = 2 * NORMAL.cdf(random.standard_normal() + shift[uid]) - 1
        yield kinds, [[one for when, one in of.items() if when > window - span] for of in tests]


def factors(network: Mapping[str, Kind], rule: Rule, seed: int) -> dict[str, list[tuple[int, float]]]:
    """Return the number of tests and the factor of each miner, by kind, once in every ``pay_windows`` windows."""
    found = defaultdict(list)
    for window, (kinds, tests) in enumerate(simulate(network, rule, seed, windows=WINDOWS), 1):
        if window % HPARAMS.pay_windows == 0 and window > HPARAMS.pay_windows:
            for name, last in zip(kinds, tests, strict=True):
                found[name].append((len(last), own_pages_factor(last)))
    return found


def paid_after_turn(network: Mapping[str, Kind], rule: Rule, seed: int) -> float:
    """Return the sum of the factors of a miner over the windows in which it trained elsewhere."""
    last = TURNS + 2 * HPARAMS.pay_windows
    every = list(simulate(network, rule, seed, windows=last, turns=TURNS))
    return sum(own_pages_factor(tests[kinds.index("24")]) for kinds, tests in every[TURNS:])


def main() -> None:
    rows = []
    for network, kinds in NETWORKS.items():
        for rule, doubt in RULES.items():
            runs = [factors(kinds, doubt, seed) for seed in range(SEEDS)]
            turned = statistics.fmean(paid_after_turn(kinds, doubt, seed) for seed in range(SEEDS))
            for kind in kinds:
                of_kind = [one for run in runs for one in run[kind]]
                found = [factor for _, factor in of_kind]
                rows.append(
                    {
                        "network": network,
                        "draw by": rule,
                        "miner": kind,
                        "tests": f"{statistics.fmean(count for count, _ in of_kind):.1f}",
                        "mean factor": f"{statistics.fmean(found):.3f}",
                        "share with a factor": f"{statistics.fmean(factor > 0 for factor in found):.3f}",
                        "unfavourable tenth": f"{np.quantile(found, 0.9 if kind in CHEATS else 0.1):.2f}",
                        "windows paid after turning": f"{turned:.1f}" if kind == "24" else "",
                    }
                )
    for row in rows:
        print("| " + " | ".join(row.values()) + " |", flush=True)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()

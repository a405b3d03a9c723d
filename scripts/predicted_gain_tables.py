"""Makes the tables of docs/benchmarks/scoring.md from the records of ``predicted_gain.py``.

    python scripts/predicted_gain_tables.py FOLDER

Prints Markdown and writes ``docs/benchmarks/predicted_gain.csv``. Takes a minute.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from tplr.scoring import credit as credit_module
from tplr.scoring.credit import credit, gram_of, non_negative
from tplr.scoring.measures import OWN_PAGES_HIGH, OWN_PAGES_LOW
from tplr.scoring.own_pages import deviations, indicator
from tplr.training.alignment import Alignment

TABLE = Path(__file__).parents[1] / "docs" / "benchmarks" / "predicted_gain.csv"
SPANS = ((0, 20), (10, 30))
POWERS = (1.0, 1.5, 2.0)
# uids of ``predicted_gain.members``: three equal honest miners, and those who are with them.
EQUAL, EFFORTS, ALL_HONEST = (3, 4, 5), (1, 2, 3), (1, 2, 3, 4, 5, 14, *range(21, 29))
AGAINST_EQUAL = {
    "4 identical clones": range(14, 18),
    "4 near clones": (14, 18, 19, 20),
    "split of 64 over 8": range(21, 29),
    "dealt over 8": range(29, 37),
    "copier with noise": (9,),
    "copier, 30 % own indices": (10,),
}
CHEATS = {6: "random values", 7: "signs flipped", 8: "large norm", 11: "repeater", 12: "overfitter", 13: "wrong pages"}
TESTS_LO, TESTS_HI, TESTS = OWN_PAGES_LOW, OWN_PAGES_HIGH, 8
# Cosines of eight clones with their source; the rest is noise of their own.
NOISY, SOURCE, CLONES = (0.9, 0.8, 0.7, 0.6, 0.5), 14, range(100, 108)
Credits = Callable[[Sequence[Alignment]], np.ndarray]


@dataclass(frozen=True)
class Recorded:
    """A simulated run: windows of inner products of the steps as applied, [windows, uids] and [windows, uids, uids]."""

    scheme: str
    vocabulary: str
    data: dict[str, np.ndarray]
    products: np.ndarray
    gram: np.ndarray
    factors: np.ndarray

    @classmethod
    def read(cls, path: Path) -> "Recorded":
        """One file of ``predicted_gain.py``."""
        scheme, vocabulary, _ = path.stem.split("-")
        data = dict(np.load(path))
        factors = 1 / np.maximum(data["norms"], 1e-30) if scheme == "demo" else data["factors"]
        lengths = np.sqrt(np.square(data["gradient_norms"]).sum(axis=-1))
        products = (data["products"] * factors).sum(axis=-1) / lengths[:, None]
        gram = np.einsum("wijt,wit,wjt->wij", data["gram"], factors, factors)
        return cls(scheme, vocabulary, data, products, gram, factors)

    @property
    def deep(self) -> np.ndarray:
        """The windows in which losses and gradients on assigned pages were measured."""
        return np.arange(len(self.products))[1::2]

    def alignment(self, window: int, uids: Sequence[int]) -> Alignment:
        """What a validator of these miners alone would have published."""
        rows = np.array(uids) - 1
        gram, upper = self.gram[window][np.ix_(rows, rows)], np.triu_indices(len(rows))
        squares = np.diag(gram)[np.diag(gram) > 0]
        scale = np.sqrt(np.median(squares)) if len(squares) else 1.0
        products = self.products[window, rows] / scale
        return Alignment(tuple(uids), tuple(products), (), tuple(gram[upper] / scale**2))

    def credits(self, uids: Sequence[int], span: tuple[int, int], rule: Credits) -> dict[int, float]:
        """Credits of these miners alone over a span of windows."""
        values = rule([self.alignment(window, sorted(uids)) for window in range(*span)])
        return dict(zip(sorted(uids), values, strict=True))

    def noisy_clones(self, window: int, cosine: float) -> Alignment:
        """Three equal honest miners, and clones of one source, each with as much noise as to have this cosine with it.

        Noise has no product with anything else.
        """
        one = self.alignment(window, (*EQUAL, SOURCE))
        place, clones, count = len(EQUAL), len(CLONES), len(EQUAL) + len(CLONES)
        gram, found = gram_of(one), np.zeros((count, count))
        found[:place, :place] = gram[:place, :place]
        found[place:, :place] = cosine * gram[place, :place]
        found[:place, place:] = found[place:, :place].T
        found[place:, place:] = gram[place, place] * (cosine**2 + (1 - cosine**2) * np.eye(clones))
        products = (*one.products[:place], *[cosine * one.products[place]] * clones)
        return Alignment((*EQUAL, *CLONES), products, (), tuple(found[np.triu_indices(count)]))


def as_paid(windows: Sequence[Alignment]) -> np.ndarray:
    """Credit as ``scoring.credit`` has it."""
    found = credit(windows, [dict.fromkeys(one.uids, True) for one in windows])
    return np.array([found[uid].value for uid in windows[0].uids])


def plain_regression(windows: Sequence[Alignment]) -> np.ndarray:
    """``beta * b`` of the non-negative ridge regression on the Gram matrix itself, with a ridge of 0.1."""
    found = credit(windows, [dict.fromkeys(one.uids, True) for one in windows])
    gains = np.array([max(0.0, found[uid].mean) for uid in windows[0].uids])
    gram = np.mean([gram_of(one) for one in windows], axis=0)
    return non_negative(gram + 0.1 * np.diag(gram).mean() * np.eye(len(gram)), gains) * gains


def correlations(run: Recorded) -> dict[str, list[float]]:
    """Rank correlation of each way to weigh tensors with the measured loss change, window by window."""
    data, deep, uids = run.data, run.deep, run.data["evaluated"] - 1
    products, norms = data["products"], np.maximum(data["norms"], 1e-30)
    gradients, sizes = data["gradient_norms"][:, None], np.sqrt(data["sizes"][0])
    unit = products / norms
    ways = {
        "as sent": products.sum(axis=-1),
        "unit norm of each tensor": unit.sum(axis=-1),
        "unit norm, times the root of its entries": (unit * sizes).sum(axis=-1),
        "mean cosine of tensors": (unit / gradients).mean(axis=-1),
        "mean cosine, times the root of its entries": (unit / gradients * sizes).mean(axis=-1),
    }
    if run.scheme != "demo":
        ways["clipped"] = (products * run.factors).sum(axis=-1)
        ways["clipped, mean cosine"] = (products * run.factors / gradients).mean(axis=-1)
    falls = data["falls"].mean(axis=-1)
    found = {what: [spearman(b[w, uids], falls[i]) for i, w in enumerate(deep)] for what, b in ways.items()}
    if "signed" in data:
        signed = data["signed"].sum(axis=-1)
        found["signs, decoded"] = [spearman(signed[i, uids], falls[i]) for i in range(len(deep))]
    return found


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation."""
    return float(np.corrcoef(x.argsort().argsort(), y.argsort().argsort())[0, 1])


def scenarios(run: Recorded, span: tuple[int, int], rule: Credits, power: float) -> Iterator[tuple[str, float]]:
    """Ratios of pay by credit alone."""

    def pay(uids: Sequence[int]) -> dict[int, float]:
        return {uid: value**power for uid, value in run.credits(uids, span, rule).items()}

    equal = pay(EQUAL)
    yield "3 equal miners: largest over smallest", max(equal.values()) / max(min(equal.values()), 1e-9)
    many = pay(ALL_HONEST)
    most = [many[uid] for uid in (3, 4, 5, 14)]
    yield "4 equal miners among 14: largest over smallest", max(most) / max(min(most), 1e-9)
    efforts = pay(EFFORTS)
    yield "24 over 8 sequences", efforts[2] / max(efforts[1], 1e-9)
    yield "64 over 24 sequences", efforts[3] / max(efforts[2], 1e-9)
    for what, others in AGAINST_EQUAL.items():
        found = pay((*EQUAL, *others))
        yield (
            f"{what}, over an honest miner",
            sum(found[uid] for uid in others) / np.mean([found[uid] for uid in EQUAL]).item(),
        )
        if others == (10,):
            yield "its victim, over other honest ones", found[3] * 2 / (found[4] + found[5])
    for cosine in NOISY:
        values = rule([run.noisy_clones(window, cosine) for window in range(*span)]) ** power
        places = len(EQUAL)
        yield (
            f"8 clones with a cosine of {cosine}, over an honest miner",
            values[places:].sum() / values[:places].mean(),
        )
    for uid, what in CHEATS.items():
        found = pay((*EFFORTS, uid))
        yield f"{what}, over 64 sequences", found[uid] / max(found[3], 1e-9)


def indicators(run: Recorded, uids: Sequence[int]) -> Iterator[tuple[str, list[float]]]:
    """Indicators of the own-pages test among these miners, by kind."""
    kinds, tested = run.data["kinds"], run.data["tested"].tolist()
    own = np.einsum("dijt,djt->dij", run.data["owns"], run.factors[run.deep])
    for uid in tested:
        among = sorted({*uids, uid})
        places, own_test, others = np.array(among) - 1, [], []
        for i, window in enumerate(run.deep):
            tests = {one: own[i, row, places] for row, one in enumerate(tested) if one in among}
            for (who, page), ahead in deviations(tests, run.alignment(window, among)).items():
                if who == uid:
                    (own_test if page == uid else others).append(ahead)
        yield str(kinds[uid - 1]), [indicator(one, others) for one in own_test] if others else []


def own_factors(values: Sequence[float]) -> tuple[float, float, float]:
    """Of the mean of ``TESTS`` tests: the factor's mean, 10 % and 90 % quantile."""
    drawn = np.random.default_rng(0).choice(values, (4000, TESTS)).mean(axis=1)
    factors = np.clip((drawn - TESTS_LO) / (TESTS_HI - TESTS_LO), 0, 1)
    low, high = np.percentile(factors, (10, 90))
    return float(factors.mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    runs = [Recorded.read(path) for path in sorted(parser.parse_args().folder.glob("*.npz"))]
    rows: list[list[object]] = []
    for key in sorted({(run.scheme, run.vocabulary) for run in runs}):
        some = [run for run in runs if (run.scheme, run.vocabulary) == key]
        print(f"\n{key}: {len(some)} seeds\n")
        for table in (correlation_rows(some), credit_rows(some), own_pages_rows(some)):
            for row in table:
                print("| " + " | ".join(f"{one:.2f}" if isinstance(one, float) else str(one) for one in row) + " |")
                rows.append([*key, len(some), *row])
            print()
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["scheme", "vocabulary", "seeds", "table", "what", "a", "b", "c", "d"])
        writer.writerows([f"{one:.4f}" if isinstance(one, float) else one for one in row] for row in rows)


def correlation_rows(runs: Sequence[Recorded]) -> Iterator[list[object]]:
    """Median and worst over windows and seeds, medians of the first and the last five measured windows."""
    found = defaultdict[str, list[list[float]]](list)
    for run in runs:
        for what, values in correlations(run).items():
            found[what].append(values)
    for what, seeds in found.items():
        every = [one for values in seeds for one in values]
        early, late = ([one for values in seeds for one in values[part]] for part in (slice(5), slice(-5, None)))
        yield ["rank correlation", what, median(every), min(every), median(early), median(late)]


def credit_rows(runs: Sequence[Recorded]) -> Iterator[list[object]]:
    """Median, smallest and largest over seeds and spans."""
    rules: dict[str, tuple[Credits, float]] = {f"credit, power {power:g}": (as_paid, power) for power in POWERS}
    rules["regression on G, power 1"] = plain_regression, 1.0
    for name, (rule, power) in rules.items():
        yield from _credit_rows(runs, name, rule, power)
    for constant, values in {"CHANCE": (1.0, 3.0), "RIDGE": (0.005, 0.1), "APART": (0.05, 0.35)}.items():
        usual = getattr(credit_module, constant)
        for value in values:
            setattr(credit_module, constant, value)
            yield from _credit_rows(runs, f"{constant} {value:g}, power 1", as_paid, 1.0)
        setattr(credit_module, constant, usual)


def _credit_rows(runs: Sequence[Recorded], name: str, rule: Credits, power: float) -> Iterator[list[object]]:
    found = defaultdict[str, list[float]](list)
    for run in runs:
        for span in SPANS:
            for what, value in scenarios(run, span, rule, power):
                found[what].append(value)
    for what, values in found.items():
        yield [name, what, median(values), min(values), max(values)]


def own_pages_rows(runs: Sequence[Recorded]) -> Iterator[list[object]]:
    """Mean indicator, and mean, 10 % and 90 % quantile of the factor."""
    for uids in (range(1, 14), (1, 2, 3, 4, 5, 13), (3, 4, 5, 13)):
        found = defaultdict[str, list[float]](list)
        for run in runs:
            for kind, values in indicators(run, uids):
                found[kind] += values
        for kind, values in found.items():
            if len(uids) > 6 or kind.startswith(("honest", "wrong")):
                yield [f"own pages, {len(uids)} updates", kind, float(np.mean(values)), *own_factors(values)]


if __name__ == "__main__":
    main()

"""Makes the tables of docs/benchmarks/scoring.md from the records of ``predicted_gain.py``.

    python scripts/predicted_gain_tables.py FOLDER
    python scripts/predicted_gain_tables.py FOLDER --only gradients
    python scripts/predicted_gain_tables.py

With the folder of recordings, it writes ``docs/benchmarks/predicted_gain.csv`` in about a minute. In all cases it
prints the tables of the page as Markdown, from that file alone.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import median

import numpy as np

from tplr.scoring import credit as credit_module
from tplr.scoring.credit import credit, even_scales, gram_of, non_negative
from tplr.scoring.gain import predicted_gains
from tplr.scoring.measures import OWN_PAGES_HIGH, OWN_PAGES_LOW
from tplr.scoring.own_pages import deviations, indicator
from tplr.training.alignment import Alignment

TABLE = Path(__file__).parents[1] / "docs" / "benchmarks" / "predicted_gain.csv"
SPANS = ((0, 20), (10, 30))
POWERS = (1.0, 1.5, 2.0)
# uids of ``predicted_gain.members``: applied miners, three equal honest ones, and the other miners of each scenario.
APPLIED = (1, 2, 3, 4, 5)
EQUAL, EFFORTS, ALL_HONEST = (3, 4, 5), (1, 2, 3), (1, 2, 3, 4, 5, 14, *range(21, 29))
AGAINST_EQUAL = {
    "4 identical clones": range(14, 18),
    "4 near clones": (14, 18, 19, 20),
    "split of 64 over 8": range(21, 29),
    "dealt over 8": range(29, 37),
    "copier with noise": (9,),
    "copier, 30 % own indices": (10,),
}
CHEATS = {
    6: "random values",
    7: "signs flipped",
    8: "large norm",
    11: "repeater",
    12: "overfitter",
    13: "wrong pages",
    (STEEP := 37): "plain gradient",
}
TESTS_LO, TESTS_HI, TESTS = OWN_PAGES_LOW, OWN_PAGES_HIGH, 8
# Cosines of eight clones with their source; the rest of each clone is independent noise.
NOISY, SOURCE, CLONES = (0.9, 0.8, 0.7, 0.6, 0.5), 14, range(100, 108)
Credits = Callable[[Sequence[Alignment]], np.ndarray]
WITHOUT_STEEP = "without the plain gradient"
# Names of tables in the file.
CORRELATION, BY_GRADIENTS = "rank correlation", "rank correlation, gradients"
PAID, UNSCALED, REGRESSION = "credit as paid", "credit", "regression on G, power 1"
CONSTANTS = {"CHANCE": (1.0, 3.0), "RIDGE": (0.005, 0.1), "APART": (0.05, 0.35)}

# --- the page -------------------------------------------------------------------------------------------------------
SCHEMES = {"demo": "DeMo", "sparseloco": "SparseLoCo", "muon": "Muon"}
# The file also has weights that are in no table of the page. Nodes use the bold ones.
USED = {"demo": "unit norm of each tensor", "sparseloco": "clipped", "muon": "clipped"}
WEIGHTS = {
    "demo": {
        "as sent": "as sent",
        "unit norm of each tensor": "unit norm of each tensor",
        "unit norm, times the root of its entries": "unit norm, times the root of its entries",
        "mean cosine of tensors": "mean cosine of tensors",
        "mean cosine, times the root of its entries": "mean cosine, times the root of its entries",
        "signs, decoded": "signs of the decoded update",
    },
    "sparseloco": {
        one: one
        for one in (
            "as sent",
            "unit norm of each tensor",
            "mean cosine of tensors",
            "clipped, mean cosine",
            "clipped",
        )
    },
    "muon": {one: one for one in ("as sent", "unit norm of each tensor", "clipped, mean cosine", "clipped")},
}
# A quotient above this means a denominator of 0: the other miner has no credit.
NO_CREDIT = 1000
# Rows of the tables of other rules and constants.
EQUAL_THREE, EQUAL_FOUR = "3 equal miners: largest over smallest", "4 equal miners among 14: largest over smallest"
NOISY_COPY, DEALT = "copier with noise, over an honest miner", "dealt over 8, over an honest miner"
CLONES_AT = "8 clones with a cosine of {}, over an honest miner"
COMPARED = (EQUAL_THREE, EQUAL_FOUR, NOISY_COPY, *(CLONES_AT.format(one) for one in (0.9, 0.7, 0.5)), DEALT)
CHANGED = {
    "CHANCE": (EQUAL_THREE, EQUAL_FOUR, "24 over 8 sequences", "split of 64 over 8, over an honest miner"),
    "RIDGE": ("4 identical clones, over an honest miner", NOISY_COPY),
    "APART": (EQUAL_FOUR, CLONES_AT.format(0.7), DEALT),
}
USUAL = {constant: getattr(credit_module, constant) for constant in CONSTANTS}
Row = Mapping[str, str]


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
        """Read one file of ``predicted_gain.py``."""
        scheme, vocabulary, _ = path.stem.split("-")
        data = dict(np.load(path))
        factors = 1 / np.maximum(data["norms"], 1e-30) if scheme == "demo" else data["factors"]
        lengths = np.sqrt(np.square(data["gradient_norms"]).sum(axis=-1))
        products = (data["products"] * factors).sum(axis=-1) / lengths[:, None]
        gram = np.einsum("wijt,wit,wjt->wij", data["gram"], factors, factors)
        return cls(scheme, vocabulary, data, products, gram, factors)

    @property
    def deep(self) -> np.ndarray:
        """Return the windows in which losses and gradients on assigned pages were measured."""
        return np.arange(len(self.products))[1::2]

    def alignment(self, window: int, uids: Sequence[int]) -> Alignment:
        """Return the alignment that a validator would have published for only these miners.

        The unit is the median length of their steps; the recordings do not have that of nodes.
        """
        rows = np.array(uids) - 1
        gram, upper = self.gram[window][np.ix_(rows, rows)], np.triu_indices(len(rows))
        squares = np.diag(gram)[np.diag(gram) > 0]
        scale = np.sqrt(np.median(squares)) if len(squares) else 1.0
        products = self.products[window, rows] / scale
        return Alignment(tuple(uids), tuple(products), (), tuple(gram[upper] / scale**2))

    def credits(self, uids: Sequence[int], span: tuple[int, int], rule: Credits) -> dict[int, float]:
        """Return the credits of only these miners over a span of windows."""
        values = rule([self.alignment(window, sorted(uids)) for window in range(*span)])
        return dict(zip(sorted(uids), values, strict=True))

    def noisy_clones(self, window: int, cosine: float) -> Alignment:
        """Return three equal honest miners and clones of one source, each with enough noise to have this cosine with
        the source.

        Products of the noise with anything else are 0.
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
    """Return the credit as on the score board, with every update included: ``even_scales`` gives all windows equal
    weight."""
    return _credit(windows, even_scales([one.products for one in windows]))


def unscaled(windows: Sequence[Alignment]) -> np.ndarray:
    """Return the credit of gains as measured, without ``even_scales``, which were added later."""
    return _credit(windows, None)


def _credit(windows: Sequence[Alignment], scales: np.ndarray | None) -> np.ndarray:
    found = credit(windows, [dict.fromkeys(one.uids, True) for one in windows], scales=scales)
    return np.array([found[uid].value for uid in windows[0].uids])


def plain_regression(windows: Sequence[Alignment]) -> np.ndarray:
    """Return ``beta * b`` of the non-negative ridge regression on the Gram matrix, with a ridge of 0.1."""
    found = credit(windows, [dict.fromkeys(one.uids, True) for one in windows])
    gains = np.array([max(0.0, found[uid].mean) for uid in windows[0].uids])
    gram = np.mean([gram_of(one) for one in windows], axis=0)
    return non_negative(gram + 0.1 * np.diag(gram).mean() * np.eye(len(gram)), gains) * gains


def correlations(run: Recorded) -> dict[str, list[float]]:
    """Return the rank correlation of each tensor weighting with the measured loss change, window by window.

    The one that nodes use also over all updates but the plain gradient, whose whole step overshoots.
    """
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
    others, used = data["evaluated"] != STEEP, ways[USED[run.scheme]]
    found[WITHOUT_STEEP] = [spearman(used[w, uids[others]], falls[i][others]) for i, w in enumerate(deep)]
    if "signed" in data:
        signed = data["signed"].sum(axis=-1)
        found["signs, decoded"] = [spearman(signed[i, uids], falls[i]) for i in range(len(deep))]
    return found


def gradient_correlations(run: Recorded) -> dict[str, list[float]]:
    """Return the rank correlation of predicted gains with the loss change on pages that no gradient was computed on.

    By the gradient on held-out pages alone, and as nodes predict it: also by those on the pages of the applied miners,
    and of half as many others. The latter also without the plain gradient.
    """
    data, everybody = run.data, tuple(range(1, 1 + run.products.shape[1]))
    own = np.einsum("dijt,djt->dij", data["owns"], run.factors[run.deep]) / data["own_lengths"][:, :, None]
    tested = data["tested"].tolist()
    counted = [*APPLIED, *[uid for uid in tested if uid not in APPLIED][: len(APPLIED) // 2]]
    found = defaultdict[str, list[float]](list)
    others = data["evaluated"] != STEEP
    for i, window in enumerate(run.deep):
        held_out = Alignment(everybody, tuple(run.products[window]), (), ())
        tests = {uid: own[i, tested.index(uid)] for uid in counted}
        falls = data["fresh_falls"][i].mean(axis=-1)
        for what, gradients in (("held-out pages", {}), ("all gradients", tests)):
            by_uid = predicted_gains(held_out, gradients)
            gains = np.array([by_uid[uid] for uid in data["evaluated"]])
            found[what].append(spearman(gains, falls))
        found[f"all gradients, {WITHOUT_STEEP}"].append(spearman(gains[others], falls[others]))
    return found


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return the rank correlation."""
    return float(np.corrcoef(x.argsort().argsort(), y.argsort().argsort())[0, 1])


def scenarios(run: Recorded, span: tuple[int, int], rule: Credits, power: float) -> Iterator[tuple[str, float]]:
    """Yield the ratios of pay by credit alone."""

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
            sum(found[uid] for uid in others) / max(np.mean([found[uid] for uid in EQUAL]).item(), 1e-9),
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
    """Yield the indicators of the own-pages test among these miners, by kind."""
    kinds, tested = run.data["kinds"], run.data["tested"].tolist()
    own = np.einsum("dijt,djt->dij", run.data["owns"], run.factors[run.deep])
    for uid in tested:
        among = sorted({*uids, uid})
        places, own_test, others = np.array(among) - 1, [], []
        for i, window in enumerate(run.deep):
            tests = {one: own[i, row, places] for row, one in enumerate(tested) if one in among}
            for (who, page), ahead in deviations(tests, run.alignment(window, among), ()).items():
                if who == uid:
                    (own_test if page == uid else others).append(ahead)
        yield str(kinds[uid - 1]), [indicator(one, others) for one in own_test] if others else []


def own_factors(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, the 10 % and the 90 % quantile of the factor that follows from the mean of ``TESTS`` tests."""
    drawn = np.random.default_rng(0).choice(values, (4000, TESTS)).mean(axis=1)
    factors = np.clip((drawn - TESTS_LO) / (TESTS_HI - TESTS_LO), 0, 1)
    low, high = np.percentile(factors, (10, 90))
    return float(factors.mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of recordings; without it the file is only read")
    parser.add_argument(
        "--only", nargs="+", choices=MADE, default=[*MADE], help="write these tables, and keep the others"
    )
    given = parser.parse_args()
    if given.folder:
        write([Recorded.read(path) for path in sorted(given.folder.glob("*.npz"))], given.only)
    for name, table in page_tables(read()).items():
        print(f"{name}\n\n{table}\n")


def write(runs: Sequence[Recorded], only: Sequence[str]) -> None:
    """Write these tables of ``TABLE`` for the schemes and vocabularies of the runs; the others stay."""
    keys = sorted({(run.scheme, run.vocabulary) for run in runs})
    rows: list[list[object]] = [
        [one for one in row.values() if one is not None]
        for row in (read() if TABLE.exists() else [])
        if _made_by(row["table"]) not in only or (row["scheme"], row["vocabulary"]) not in keys
    ]
    for key in keys:
        some = [run for run in runs if (run.scheme, run.vocabulary) == key]
        rows += [[*key, len(some), *row] for name in only for row in MADE[name](some)]
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["scheme", "vocabulary", "seeds", "table", "what", "a", "b", "c", "d"])
        writer.writerows([f"{one:.4f}" if isinstance(one, float) else one for one in row] for row in rows)


def _made_by(table: str) -> str:
    """Return the name in ``MADE`` of what makes a table of the file."""
    return {CORRELATION: "correlation", BY_GRADIENTS: "gradients"}.get(
        table, "own pages" if table.startswith("own pages") else "credit"
    )


def correlation_rows(runs: Sequence[Recorded]) -> Iterator[list[object]]:
    """Yield the rank correlations of weightings of tensors."""
    return _correlation_rows(CORRELATION, [correlations(run) for run in runs])


def gradient_rows(runs: Sequence[Recorded]) -> Iterator[list[object]]:
    """Yield the rank correlations of one gradient and of all."""
    return _correlation_rows(BY_GRADIENTS, [gradient_correlations(run) for run in runs])


def _correlation_rows(table: str, runs: Sequence[Mapping[str, list[float]]]) -> Iterator[list[object]]:
    """Yield the median and worst over windows and seeds, and medians of the first and last five measured windows."""
    for what in runs[0]:
        seeds = [run[what] for run in runs]
        every = [one for values in seeds for one in values]
        early, late = ([one for values in seeds for one in values[part]] for part in (slice(5), slice(-5, None)))
        yield [table, what, median(every), min(every), median(early), median(late)]


def credit_rows(runs: Sequence[Recorded]) -> Iterator[list[object]]:
    """Yield the median, smallest and largest over seeds and spans."""
    rules: dict[str, tuple[Credits, float]] = {f"{PAID}, power {power:g}": (as_paid, power) for power in POWERS}
    rules |= {f"{UNSCALED}, power {power:g}": (unscaled, power) for power in POWERS}
    rules[REGRESSION] = plain_regression, 1.0
    for name, (rule, power) in rules.items():
        yield from _credit_rows(runs, name, rule, power)
    for constant, values in CONSTANTS.items():
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
    """Yield the mean indicator, and the mean, 10 % and 90 % quantile of the factor."""
    for uids in (range(1, 14), (1, 2, 3, 4, 5, 13), (3, 4, 5, 13)):
        found = defaultdict[str, list[float]](list)
        for run in runs:
            for kind, values in indicators(run, uids):
                found[kind] += values
        for kind, values in found.items():
            if len(uids) > 6 or kind.startswith(("honest", "wrong")):
                yield [f"own pages, {len(uids)} updates", kind, float(np.mean(values)), *own_factors(values)]


MADE = {
    "correlation": correlation_rows,
    "gradients": gradient_rows,
    "credit": credit_rows,
    "own pages": own_pages_rows,
}


def read() -> list[Row]:
    """Return the rows of ``TABLE``."""
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def page_tables(rows: Sequence[Row]) -> dict[str, str]:
    """Return the tables of docs/benchmarks/scoring.md, by name."""
    tables = {f"rank correlation, {SCHEMES[scheme]}": _correlations(rows, scheme) for scheme in SCHEMES}
    tables["rank correlation, gradients"] = _gradients(rows)
    rule = credit_rule(rows)
    for vocabulary in ("1024", "256"):
        columns = [
            (f"{SCHEMES[scheme]}, p = {power}", scheme, vocabulary, f"{rule}, power {power}")
            for scheme in _schemes(rows, vocabulary)
            for power in (1, 2)
        ]
        tables[f"credit, vocabulary {vocabulary}"] = _ratios(rows, columns)
    columns = [(SCHEMES[scheme], scheme, "1024", REGRESSION) for scheme in _schemes(rows, "1024")]
    tables["regression"] = _ratios(rows, columns, only=COMPARED)
    tables["constants"] = _constants(rows, rule)
    tables["own pages"] = _own_pages(rows)
    return tables


def credit_rule(rows: Sequence[Row]) -> str:
    """Return the rule of the credit tables: the one used for pay, if the file has it."""
    return PAID if any(row["table"].startswith(PAID) for row in rows) else UNSCALED


def _schemes(rows: Sequence[Row], vocabulary: str) -> list[str]:
    return [scheme for scheme in SCHEMES if any((r["scheme"], r["vocabulary"]) == (scheme, vocabulary) for r in rows)]


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    first, *lines = ("| " + " | ".join(line) + " |" for line in (head, *body))
    return "\n".join([first, "|---" * len(head) + "|", *lines])


def _correlations(rows: Sequence[Row], scheme: str) -> str:
    found = {
        row["what"]: [_number(row[one]) for one in "abcd"]
        for row in rows
        if (row["scheme"], row["vocabulary"], row["table"]) == (scheme, "1024", CORRELATION)
    }
    lines = [[name, *found[what]] for what, name in WEIGHTS[scheme].items()]
    used = list(WEIGHTS[scheme]).index(USED[scheme])
    lines[used] = [f"**{one}**" for one in lines[used]]
    return _markdown([f"{SCHEMES[scheme]}, weight of tensors", "median", "worst", "early", "late"], lines)


def _gradients(rows: Sequence[Row]) -> str:
    """Return the rank correlations of one gradient and of all, by scheme and vocabulary."""
    some = [row for row in rows if row["table"] == BY_GRADIENTS]
    body = [
        [SCHEMES[scheme], row["vocabulary"], row["what"], *(_number(row[one]) for one in "abcd")]
        for scheme in SCHEMES
        for row in some
        if row["scheme"] == scheme
    ]
    return _markdown(["", "vocabulary", "predicted by", "median", "worst", "early", "late"], body)


def _by_name(rows: Sequence[Row]) -> dict[tuple[str, str, str, str], Row]:
    return {(row["scheme"], row["vocabulary"], row["table"], row["what"]): row for row in rows}


def _ratios(rows: Sequence[Row], columns: Sequence[tuple[str, str, str, str]], only: Sequence[str] = ()) -> str:
    """Return a column for each scheme, vocabulary and table of the file."""
    found, keys = _by_name(rows), {column[1:] for column in columns}
    names = only or list(dict.fromkeys(what for *key, what in found if tuple(key) in keys))
    body = [[what, *(_ratio(found[*column[1:], what]) for column in columns)] for what in names]
    return _markdown(["", *(column[0] for column in columns)], body)


def _constants(rows: Sequence[Row], rule: str) -> str:
    """Return the medians with a smaller constant, the usual one and a larger one."""
    found, schemes, body = _by_name(rows), _schemes(rows, "1024"), []
    for constant, names in CHANGED.items():
        low, high = (f"{constant} {value:g}, power 1" for value in CONSTANTS[constant])
        tables = (low, f"{rule}, power 1", high)
        values = " / ".join(f"{one:g}" for one in (CONSTANTS[constant][0], USUAL[constant], CONSTANTS[constant][1]))
        for what in names:
            medians = [" / ".join(_number(found[one, "1024", table, what]["a"]) for table in tables) for one in schemes]
            body.append([f"`{constant}` {values}", what, *medians])
    return _markdown(["constant", "", *(SCHEMES[one] for one in schemes)], body)


def _ratio(row: Row) -> str:
    middle, low, high = (_number(row[one]) for one in "abc")
    return middle if low == middle == high else f"{middle} ({low} to {high})"


def _number(text: str) -> str:
    value = Decimal(text)
    digits = Decimal("0.1") if value >= 10 else Decimal("0.01")
    return f"over {NO_CREDIT}" if value > NO_CREDIT else str(value.quantize(digits, ROUND_HALF_UP))


def _own_pages(rows: Sequence[Row]) -> str:
    """Return the mean indicator, and the mean factor with the unfavourable quantile: 10 % for honest miners, 90 % for
    others."""
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in rows:
        if row["table"] == "own pages, 13 updates":
            honest = row["what"].startswith(("honest", "split"))
            factor = f"{_number(row['b'])} ({_number(row['c' if honest else 'd'])})"
            found[row["scheme"], row["vocabulary"]][row["what"]] = f"{_number(row['a'])}: {factor}"
    keys = [(scheme, vocabulary) for vocabulary in ("1024", "256") for scheme in _schemes(rows, vocabulary)]
    head = [f"{SCHEMES[scheme]}, {vocabulary}" for scheme, vocabulary in keys]
    body = [[what, *(found[key].get(what, "–") for key in keys)] for what in found[keys[0]]]
    return _markdown(["miner", *head], body)


if __name__ == "__main__":
    main()

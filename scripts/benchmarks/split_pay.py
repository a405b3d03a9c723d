"""Measures the pay of one miner's work that is split over eight uids, from noisy to nearly noiseless gradients.

    python scripts/benchmarks/split_pay.py [--seeds 8]

Updates are synthetic, scores are not. A miner's update is ``snr * g + noise``: ``g`` is the true gradient, of norm 1,
and the noise is independent, equal in all entries, and of norm ``sqrt(64 / sequences)``. So ``snr`` is signal over
noise of a whole, the update of 64 sequences; a part has 8. The validator's gradient has 64 sequences, too. ``kept`` is
the cosine of what is sent with that update: the rest is independent and the same for all efforts, as what sparse
updates leave out. Inner products are drawn from their exact distribution, so an update may have any number of entries.
The nodes' code clips steps, scales products, and computes credit, scores and pay from 20 windows. All own-pages tests
are passed.

Steps:

- unit: every step has norm 1, as with DeMo.
- steps: a part makes one inner step, a whole eight of the same batch, and the norm grows with them (SparseLoCo).
- batches: a part makes as many inner steps as a whole, with batches of an eighth; each has norm 1.
- unscaled: the update itself; a part is longer than a whole, because it has more noise.

Norm caps: none; set by the honest miners alone for 20 windows before the parts come; or set by all from a run's start.
Writes ``docs/benchmarks/split_pay.csv`` and its picture.
"""

import argparse
import csv
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tplr.compress.aggregate import clip
from tplr.hparams import load_hparams
from tplr.schemas import VALID, Evaluation, Evidence, LossChange, PeerObservation, PeerScore, published
from tplr.schemas import Alignment as PublishedAlignment
from tplr.scoring.board import MeasuredWindow, pay, scores
from tplr.training.alignment import _normalised, _Sums
from tplr.training.outer.norm_caps import FIRST, HISTORY, last_caps, no_history, recorded, window_cap

TABLE = Path(__file__).parents[2] / "docs" / "benchmarks" / "split_pay.csv"
WHOLE, UIDS, WINDOWS = 64, 8, 20
PART = WHOLE // UIDS
STEPS, CAPS = ("unit", "steps", "batches", "unscaled"), ("none", "honest", "all")
# 4.4 gives the cosine of a part over a whole's that was measured with DeMo, 0.86.
SNRS = (0.1, 0.3, 1.0, 2.0, 3.0, 4.4, 8.0, 16.0, 64.0)
OTHERS, POWERS, SEEDS = (3, 9), (1.0, 2.0, 3.0), 8
# Entries, and ``kept``: with 0.2 and a snr of 4.4, a whole's cosine with the validator's gradient is that of DeMo, 0.2.
WORLDS = ((10**8, 0.2), (10**8, 1.0), (20_000, 1.0))
# Norm of a whole as a share of the cap's bound, as measured with SparseLoCo in a run's first windows.
OF_BOUND = 0.7
HPARAMS = load_hparams().model_copy(update={"pay_windows": WINDOWS})
SAME_LENGTHS = HPARAMS.model_copy(update={"outer": "demo"})
# Passes the own-pages test by loss; its error is too large for a calibration below 1.
PASSED = LossChange(before=1.0, after=0.99, error=1.0, sequences=64)
# Rows and columns of the page's table.
SPARSE = {"kept": "0.2", "others": "3"}
DENSE = {"step": "unit", "kept": "1", "others": "9", "power": "2"}
SHOWN = {
    "unit norms, power 1": {**SPARSE, "step": "unit", "power": "1"},
    "unit norms, power 2": {**SPARSE, "step": "unit", "power": "2"},
    "unit norms, power 3": {**SPARSE, "step": "unit", "power": "3"},
    "fewer inner steps, cap of honest steps, power 1": {**SPARSE, "step": "steps", "cap": "honest", "power": "1"},
    "the same, power 2": {**SPARSE, "step": "steps", "cap": "honest", "power": "2"},
    "fewer inner steps, cap of all, power 1, beside 3": {**SPARSE, "step": "steps", "cap": "all", "power": "1"},
    "the same, beside 9": {**SPARSE, "others": "9", "step": "steps", "cap": "all", "power": "1"},
    "smaller batches, cap of honest steps, power 1, beside 3": {
        **SPARSE,
        "step": "batches",
        "cap": "honest",
        "power": "1",
    },
    "smaller batches, beside 9": {**SPARSE, "others": "9", "step": "batches", "cap": "honest", "power": "1"},
    "unit norms, 20,000 entries, nothing left out, power 2, beside 9": {**DENSE, "entries": "20000"},
    "unit norms, nothing left out, power 2, beside 9": {**DENSE, "entries": "100000000"},
}
SHOWN_SNRS = (0.1, 0.3, 2.0, 4.4, 16.0)


class Case(NamedTuple):
    """One cell of the sweep; see the module."""

    step: str
    cap: str
    entries: int
    kept: float
    others: int
    snr: float


def cosine(snr: float, sequences: int) -> float:
    """Return the cosine with the true gradient, of an update of so many sequences before it is made sparse."""
    return snr / math.sqrt(snr**2 + WHOLE / sequences)


def factor(step: str, snr: float, sequences: int) -> float:
    """Return the factor of the update ``snr * g + noise`` that gives the step before it is clipped."""
    if step == "unit":
        return 1 / math.sqrt(snr**2 + WHOLE / sequences)
    if step == "steps":
        return sequences / WHOLE
    # Each of ``UIDS`` inner steps has an eighth of the sequences, so its noise is sqrt(UIDS) times as large.
    return 1 / math.sqrt(snr**2 + UIDS * WHOLE / sequences) if step == "batches" else 1.0


def drawn(random: np.random.Generator, count: int, entries: int) -> np.ndarray:
    """Return vectors [count, 1 + count] with the inner products of ``count`` noises of norm 1; column 0 is along g.

    The noises have this many entries of variance ``1 / entries``. Their inner products are drawn by Bartlett's
    decomposition of a Wishart matrix: Anderson, "An Introduction to Multivariate Statistical Analysis" (2003), 7.2.
    """
    below = np.tril(random.standard_normal((count, count)), -1)
    below += np.diag(np.sqrt(random.chisquare(entries - 1 - np.arange(count))))
    return np.hstack([random.standard_normal((count, 1)), below]) / math.sqrt(entries)


def whole_norm(case: Case) -> float:
    """Return the norm of an update of a whole's sequences, but for chance."""
    return factor(case.step, case.snr, WHOLE) * math.hypot(case.snr, 1.0)


def caps(case: Case, norms: np.ndarray) -> list[float]:
    """Return the norm cap of each window by the nodes' code, from the norms of all updates [windows, miners]."""
    if case.cap == "none" or case.step == "unit":
        return [math.inf] * len(norms)
    bound = whole_norm(case) / OF_BOUND
    before = [norms[0, : case.others]] * WINDOWS if case.cap == "honest" else []
    history, found = no_history(), []
    for step, row in enumerate((*before, *norms)):
        found.append(window_cap((row / bound).tolist(), last_caps(history, FIRST), first=step < HISTORY))
        history = recorded(history, found[-1])
    return [bound * one for one in found[len(before) :]]


def measured_windows(case: Case, seed: int) -> list[MeasuredWindow]:
    """Return the evidence of 20 windows: uids of honest miners first, then those of the split work."""
    random = np.random.default_rng(seed)
    sequences = np.array([WHOLE] * case.others + [PART] * UIDS)
    factors = np.array([factor(case.step, case.snr, one) for one in sequences])
    gradients, steps = [], []
    for _ in range(WINDOWS):
        vectors = drawn(random, 1 + 2 * len(sequences), case.entries)
        made, rest = np.split(vectors[1:], 2)
        made *= np.sqrt(WHOLE / sequences)[:, None]
        vectors[: 1 + len(sequences), 0] += case.snr
        left_out = math.sqrt(1 - case.kept**2) * np.linalg.norm(made, axis=1)
        gradients.append(vectors[0])
        steps.append(factors[:, None] * (case.kept * made + left_out[:, None] * rest))
    norms = np.linalg.norm(steps, axis=2)
    uids, found = range(len(sequences)), []
    for window, cap in enumerate(caps(case, norms)):
        step = steps[window] * np.array(clip(norms[window].tolist(), cap))[:, None]
        g = gradients[window]
        longest = cap if math.isfinite(cap) else whole_norm(case)
        flat = np.concatenate([[g @ g, longest**2, longest**2], norms[window] ** 2, step @ g, (step @ step.T).ravel()])
        aligned = _normalised(uids, _Sums(flat, len(uids)), rate=1.0)
        evidence = Evidence(
            window=window,
            observations={str(uid): observed(uid, tested=window == 0) for uid in uids},
            alignment=PublishedAlignment(
                uids=aligned.uids,
                products=published(aligned.products),
                norms=aligned.norms,
                gram=published(aligned.gram),
                unit=aligned.unit,
            ),
        )
        found.append(MeasuredWindow(evidence, SAME_LENGTHS if case.step == "unit" else HPARAMS))
    return found


def observed(uid: int, *, tested: bool) -> PeerObservation:
    """Return the observation of a valid and included update."""
    return PeerObservation(
        hotkey=str(uid),
        listed=True,
        included=True,
        sampled=tested,
        verdict=VALID,
        assigned_pages=True,
        behind=0,
        evaluation=Evaluation(assigned=PASSED, held_out=PASSED) if tested else None,
    )


def ratios(found: dict[int, PeerScore], others: int, powers: Sequence[float]) -> list[float]:
    """Return pay of all parts over that of an honest miner for each ``power_normalisation``; inf if that is 0."""
    over = []
    for power in powers:
        paid = [pay(found[uid], power) for uid in sorted(found)]
        honest = statistics.fmean(paid[:others])
        over.append(sum(paid[others:]) / honest if honest else math.inf)
    return over


def row_of(case: Case, power: float, found: Sequence[float]) -> dict[str, str]:
    """Return one row of the table from the ratios of all seeds."""
    whole, part = case.kept * cosine(case.snr, WHOLE), case.kept * cosine(case.snr, PART)
    return {
        "step": case.step,
        "cap": case.cap,
        "entries": str(case.entries),
        "kept": f"{case.kept:g}",
        "others": str(case.others),
        "power": f"{power:g}",
        "snr": f"{case.snr:g}",
        "cosine of a whole": f"{whole:.4f}",
        "cosine of a part": f"{part:.4f}",
        "part over whole": f"{part / whole:.4f}",
        "ratio": f"{statistics.median(found):.4g}",
        "least": f"{min(found):.4g}",
        "largest": f"{max(found):.4g}",
    }


def page_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table of ``docs/attackers.md`` from the rows of the file."""
    found: dict[str, list[str]] = {}
    for name, wanted in SHOWN.items():
        found[name] = [_cell(row) for row in rows if wanted.items() <= row.items() and float(row["snr"]) in SHOWN_SNRS]
    header = [f"{cosine(snr, PART) / cosine(snr, WHOLE):.2f}" for snr in SHOWN_SNRS]
    lines = [f"| cosine of a part over a whole's | {' | '.join(header)} |", "|---" * (1 + len(header)) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in found.items())])


def _cell(row: Mapping[str, str]) -> str:
    middle, least, largest = (f"{float(row[name]):.3g}" for name in ("ratio", "least", "largest"))
    return middle if least == largest else f"{middle} ({least} to {largest})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    seeds = range(parser.parse_args().seeds)
    rows = []
    for step, cap, world, others in itertools.product(STEPS, CAPS, WORLDS, OTHERS):
        if step == "unit" and cap != "none":
            continue
        for snr in SNRS:
            case = Case(step, cap, *world, others, snr)
            found = [ratios(scores(measured_windows(case, seed)), others, POWERS) for seed in seeds]
            rows += [row_of(case, *one) for one in zip(POWERS, zip(*found, strict=True), strict=True)]
            print(*(f"{row['power']}: {row['ratio']}" for row in rows[-len(POWERS) :]), *case, sep="  ", flush=True)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

    from pictures import redraw  # here: tests load this file by its path

    redraw("split_pay")
    print(page_table(rows))


if __name__ == "__main__":
    main()

"""``scripts/benchmarks/split_pay.py``: a split over 8 uids is paid 8 times the ratio of gains, to the power of pay."""

import csv
import importlib.util
import math
import statistics
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tplr.scoring.board import scores
from tplr.scoring.calibration import EXPLAINED

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "benchmarks" / "split_pay.py"
PAGE = (ROOT / "docs" / "attackers.md").read_text()
with (ROOT / "docs" / "benchmarks" / "split_pay.csv").open() as file:
    ROWS = list(csv.DictReader(file))
MANY, UIDS = 10**8, 8
NOISY, CLEAR = 0.3, 16.0  # signal over noise of a whole


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("split_pay", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def paid(script: ModuleType, snr: float, power: float, **changes) -> float:
    """Return the pay ratio of one seed."""
    usual = {"step": "unit", "cap": "none", "entries": MANY, "kept": 0.2, "others": 3, "snr": snr}
    case = script.Case(**{**usual, **changes})
    return script.ratios(scores(script.measured_windows(case, seed=0)), case.others, [power])[0]


def root(snr: float, part: float, whole: float) -> float:
    return math.sqrt((snr**2 + whole) / (snr**2 + part))


def by_length(unlimited: float, cosine: float, others: int) -> float:
    """Return the pay ratio of parts with this cosine over a whole's, from the ratio without a comparison of lengths.

    With less than a quarter of all gain they are compared with the wholes, and paid by the square of their cosine.
    """
    return UIDS * cosine**2 / EXPLAINED if unlimited < others / 3 else unlimited


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("snr", [NOISY, 3.0, CLEAR])
def test_a_step_of_unit_norm_is_paid_by_its_cosine(script, snr, power):
    """Neutral only with power 2, and only if noise dominates; eight times as much if the signal does."""
    expected = UIDS * root(snr, part=8, whole=1) ** power
    assert paid(script, snr, power) == pytest.approx(expected, rel=0.03)
    neutral = (snr, power) == (NOISY, 2.0)
    assert (0.9 < expected < 1.1) is neutral


@pytest.mark.parametrize("others", [3, 9])
@pytest.mark.parametrize("snr", [NOISY, CLEAR])
def test_fewer_inner_steps_are_paid_in_proportion_if_the_cap_is_that_of_whole_steps(script, snr, others):
    changes = {"step": "steps", "cap": "honest", "others": others}
    for power in (1.0, 2.0):
        assert paid(script, snr, power, **changes) == pytest.approx(UIDS * (1 / UIDS) ** power, rel=0.03)


@pytest.mark.parametrize("others", [3, 9])
@pytest.mark.parametrize("snr", [NOISY, CLEAR])
def test_parts_do_not_lower_the_cap_below_the_first_one(script, snr, others):
    """An eighth of the bound, if a whole has more: the parts are at most three quarters of the updates.

    Parts that are longer than the cap are clipped, too, and then as long as a whole.
    """
    found = paid(script, snr, 1.0, step="steps", cap="all", others=others)
    cosine = root(snr, part=8, whole=1)
    clipped = by_length(UIDS * cosine, cosine, others)
    assert found == pytest.approx(min(script.OF_BOUND / 0.125, clipped), rel=0.03)


@pytest.mark.parametrize("others", [3, 9])
@pytest.mark.parametrize("snr", [NOISY, CLEAR])
def test_smaller_batches_are_paid_by_the_cosine_of_an_inner_step(script, snr, others):
    expected = by_length(UIDS * root(snr, part=64, whole=8), root(snr, part=8, whole=1), others)
    assert paid(script, snr, 1.0, step="batches", cap="honest", others=others) == pytest.approx(expected, rel=0.03)


def test_unscaled_steps_are_all_paid_alike(script):
    assert paid(script, NOISY, 1.0, step="unscaled") == pytest.approx(UIDS, rel=0.03)
    assert paid(script, NOISY, 1.0, step="unscaled", cap="honest") == pytest.approx(paid(script, NOISY, 1.0), rel=0.01)


def test_parts_within_chance_are_paid_less(script):
    changes = {"entries": 20_000, "kept": 1.0}
    assert statistics.median(paid(script, 0.1, 2.0, others=others, **changes) for others in (3, 9)) < 0.8


def test_noises_have_the_inner_products_of_as_many_entries(script):
    found = [script.drawn(np.random.default_rng(seed), 3, 1000) for seed in range(400)]
    grams = np.array([one @ one.T for one in found])
    assert np.diagonal(grams, axis1=1, axis2=2).mean(axis=0) == pytest.approx([1, 1, 1], abs=0.01)
    assert np.diagonal(grams, axis1=1, axis2=2).std(axis=0) == pytest.approx([math.sqrt(2 / 1000)] * 3, rel=0.15)
    apart = grams[:, *np.triu_indices(3, 1)]
    assert apart.mean(axis=0) == pytest.approx([0, 0, 0], abs=0.006)
    assert apart.std(axis=0) == pytest.approx([math.sqrt(1 / 1000)] * 3, rel=0.15)


# --- the published figures ------------------------------------------------------------------------------------------


def test_the_page_has_the_table_of_the_file(script) -> None:
    assert script.page_table(ROWS) in PAGE


def test_what_the_page_says_of_the_table() -> None:
    def medians(others: str, **wanted: str) -> list[float]:
        wanted = {"kept": "0.2", "others": others, **wanted}
        return [float(row["ratio"]) for row in ROWS if wanted.items() <= row.items()]

    for step, cap in (("unit", "none"), ("steps", "honest")):
        for power in "123":
            rows = {"step": step, "cap": cap, "power": power}
            assert medians("9", **rows) == pytest.approx(medians("3", **rows), rel=0.01)
    unit = medians("9", step="unit", power="1")
    clipped = [min(5.6, by_length(one, one / UIDS, others=9)) for one in unit]
    found = medians("9", step="steps", cap="all", power="1")
    assert found[1:] == pytest.approx(clipped[1:], rel=0.03)
    # With a signal of a tenth of the noise the standard errors count, too.
    assert clipped[0] < found[0] < 1.1 * clipped[0]
    batches = {"step": "batches", "cap": "honest", "power": "1"}
    limited = [by_length(one, of / UIDS, others=9) for one, of in zip(medians("3", **batches), unit, strict=True)]
    assert medians("9", **batches)[1:] == pytest.approx(limited[1:], rel=0.03)
    assert math.log(UIDS) / -math.log(0.86) == pytest.approx(14, abs=0.5)
    text = " ".join(PAGE.split())
    assert f"{UIDS * 0.86**2:.1f} at 0.86 with power 2" in text
    few = [medians(others, entries="20000", kept="1", step="unit", power="2")[0] for others in ("3", "9")]
    assert f"is paid {few[0]:.2f} (beside three) and {few[1]:.2f} (beside nine) times" in text
    clones = {"step": "unit", "kept": "1", "entries": str(MANY), "power": "1"}
    whole = [float(row["cosine of a whole"]) for row in ROWS if clones.items() <= row.items() and row["others"] == "9"]
    far = [found for found, cosine in zip(medians("9", **clones), whole, strict=True) if cosine > 0.98]
    assert math.inf in far
    near = [found for found, cosine in zip(medians("9", **clones), whole, strict=True) if cosine < 0.97]
    expected = [
        found for found, cosine in zip(medians("9", step="unit", power="1"), whole, strict=True) if cosine < 0.97
    ]
    assert near == pytest.approx(expected, rel=0.02)

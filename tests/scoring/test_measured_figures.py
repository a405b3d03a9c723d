"""Measured figures in texts equal those of docs/benchmarks/predicted_gain.csv."""

import csv
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from tplr.scoring import credit
from tplr.scoring.credit import even_scales
from tplr.training.alignment import Alignment

ROOT = Path(__file__).parents[2]
with (ROOT / "docs" / "benchmarks" / "predicted_gain.csv").open() as file:
    ROWS = list(csv.DictReader(file))
PAGE = (ROOT / "docs" / "benchmarks" / "scoring.md").read_text()
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "predicted_gain_tables.py"))
TABLES = SCRIPT["page_tables"](ROWS)


def prose(heading: str) -> str:
    """Return the text below a heading of the page, without tables, in one line."""
    text = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    return " ".join(line.strip() for line in text.splitlines() if not line.startswith("|"))


def median_of(scheme: str, vocabulary: int, what: str, table: str = "credit, power 1", column: str = "a") -> str:
    key = (scheme, str(vocabulary), table, what)
    [row] = [row for row in ROWS if (row["scheme"], row["vocabulary"], row["table"], row["what"]) == key]
    return SCRIPT["_number"](row[column])


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_tables_of_the_file(name) -> None:
    assert TABLES[name] in PAGE


def test_every_scheme_of_the_file_is_on_the_page() -> None:
    assert {row["scheme"] for row in ROWS} == set(SCRIPT["SCHEMES"])


def test_the_page_says_by_which_formula_credit_is() -> None:
    """The file has figures without even scales until new recordings are made."""
    assert (SCRIPT["credit_rule"](ROWS) == "credit") == ("without the even scales of windows" in PAGE)


def test_what_the_page_says_of_splits_and_effort_names_the_schemes() -> None:
    text, split = prose("Credit"), "split of 64 over 8, over an honest miner"
    assert (
        f"it has {median_of('demo', 1024, split)} times the credit of an honest miner with DeMo, "
        f"{median_of('sparseloco', 1024, split)} (1.20 to 1.60) with SparseLoCo, and "
        f"{median_of('muon', 1024, split)} (0.64 to 0.88) with Muon; with single bytes "
        f"{median_of('demo', 256, split)} (DeMo) and {median_of('sparseloco', 256, split)} (SparseLoCo)"
    ) in text
    efforts = [median_of("sparseloco", 1024, what) for what in ("24 over 8 sequences", "64 over 24 sequences")]
    assert f"24 sequences have {efforts[0]} times the credit of 8 (linear: 3), and 64 have {efforts[1]} times" in text
    assert "a split is neutral" not in text


def test_what_the_page_says_of_single_bytes() -> None:
    text, used = prose("Single bytes"), SCRIPT["USED"]
    for scheme in ("demo", "sparseloco"):
        [middle, worst] = [median_of(scheme, 256, used[scheme], "rank correlation", one) for one in "ab"]
        assert re.search(rf"{middle} \(worst {worst}, {SCRIPT['SCHEMES'][scheme]}\)", text)
    for what in ("3 equal miners: largest over smallest", "4 identical clones, over an honest miner"):
        for scheme in ("demo", "sparseloco"):
            assert median_of(scheme, 256, what) in text


def test_new_recordings_are_paid_by_the_present_formula() -> None:
    """Without even scales, a miner that lost one of the first windows would lose more."""
    gains = [4.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    windows = [Alignment((1, 2), (0.3 * gain, 0.2 * gain), (), (1.0, 0.1, 1.0)) for gain in gains]
    counted = [{1: True, 2: True}] * len(windows)
    scales = even_scales([one.products for one in windows])
    expected = credit.credit(windows, counted, scales=scales)
    found = SCRIPT["as_paid"](windows)
    assert found == pytest.approx([expected[1].value, expected[2].value])
    assert not np.allclose(found, SCRIPT["unscaled"](windows), rtol=0.01)


def test_the_credit_of_a_copy_with_noise_is_not_said_to_be_nothing() -> None:
    """Credit alone leaves it a part; the own-pages factor makes its pay 0."""
    what = "copier with noise, over an honest miner"
    found = [float(row["a"]) for row in ROWS if (row["table"], row["what"]) == ("credit, power 1", what)]
    assert len(found) == 5  # three schemes, two of them also with single bytes
    quoted = f"{min(found):.2f} to {max(found):.2f}"
    for text in ((ROOT / "docs" / "scoring.md").read_text(), credit.__doc__ or ""):
        assert quoted in text
    factors = [row for row in ROWS if (row["table"], row["what"]) == ("own pages, 13 updates", "copier with noise")]
    assert len(factors) == 5
    assert max(float(row["b"]) for row in factors) < 0.02
    assert {float(row["d"]) for row in factors} == {0.0}  # the 90 % quantile

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


def prose(heading: str, level: str = "###") -> str:
    """Return the text below a heading of the page, without tables, in one line."""
    text = PAGE.split(f"\n{level} {heading}\n")[1].split("\n#")[0]
    return " ".join(line.strip() for line in text.splitlines() if not line.startswith("|"))


def median_of(
    scheme: str, vocabulary: int, what: str, table: str = "credit as paid, power 1", column: str = "a"
) -> str:
    key = (scheme, str(vocabulary), table, what)
    [row] = [row for row in ROWS if (row["scheme"], row["vocabulary"], row["table"], row["what"]) == key]
    return SCRIPT["_number"](row[column])


def ratio_of(scheme: str, vocabulary: int, what: str, unit: str = "") -> str:
    """Return the median, and in brackets the smallest and largest."""
    middle, lowest, highest = (median_of(scheme, vocabulary, what, column=one) for one in "abc")
    return f"{middle} {unit}({lowest} to {highest})"


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_tables_of_the_file(name) -> None:
    assert TABLES[name] in PAGE


def test_every_scheme_of_the_file_is_on_the_page() -> None:
    recorded = {(row["scheme"], row["vocabulary"], row["seeds"]) for row in ROWS}
    assert recorded == {(scheme, vocabulary, "3") for scheme in SCRIPT["SCHEMES"] for vocabulary in ("1024", "256")}
    assert "with three seeds (0, 1 and 2) each" in prose("Predicted gain and credit", level="##")


def test_what_the_page_says_of_the_plain_gradient() -> None:
    what, table = "without the plain gradient", "rank correlation"
    worst = {one: median_of(one, 1024, what, table, "b") for one in ("sparseloco", "muon")}
    quoted = f"Without it the worst windows are {worst['sparseloco']} with SparseLoCo and {worst['muon']} with Muon."
    assert quoted in prose("How well the product foretells the loss")


def test_the_page_says_by_which_formula_credit_is() -> None:
    """Credit is as paid: with even scales."""
    assert SCRIPT["credit_rule"](ROWS) == SCRIPT["PAID"]
    assert "with the even scales of windows" in prose("Credit")
    assert "without the even scales of windows" not in PAGE


def test_what_the_page_says_of_splits_and_effort_names_the_schemes() -> None:
    text, split = prose("Credit"), "split of 64 over 8, over an honest miner"
    assert (
        f"{ratio_of('demo', 1024, split, 'times ')} the credit of an honest miner with DeMo, "
        f"{ratio_of('sparseloco', 1024, split)} with SparseLoCo, and "
        f"{ratio_of('muon', 1024, split)} with Muon; with single bytes {median_of('demo', 256, split)} (DeMo), "
        f"{median_of('sparseloco', 256, split)} (SparseLoCo) and {median_of('muon', 256, split)} (Muon)"
    ) in text
    squared = [median_of(scheme, 1024, split, "credit as paid, power 2") for scheme in SCRIPT["SCHEMES"]]
    assert "it has {} times with DeMo, {} with SparseLoCo and {} with Muon".format(*squared) in text
    less, more = "24 over 8 sequences", "64 over 24 sequences"
    efforts = [median_of("sparseloco", 1024, what) for what in (less, more)]
    assert f"24 sequences have {efforts[0]} times the credit of 8 (linear: 3), and 64 have {efforts[1]} times" in text
    efforts = [median_of("sparseloco", 256, what) for what in (less, more)]
    assert f"With single bytes they have {efforts[0]} and {efforts[1]} times" in text
    lowest, highest = (median_of("sparseloco", 256, more, column=one) for one in "bc")
    assert f"all six spans ({lowest} to {highest})" in text
    assert f"64 sequences have {ratio_of('muon', 1024, more, 'times ')} the credit of 24" in text
    assert f"with single bytes {ratio_of('muon', 256, more, 'times ')}. A miner of 8 sequences" in text
    assert f"difference is within chance: {ratio_of('demo', 1024, more)}" in text
    assert "a split is neutral" not in text


def test_what_the_page_says_of_cheats_and_equal_miners() -> None:
    text, over = prose("Credit"), "{}, over 64 sequences"
    three, four = "3 equal miners: largest over smallest", "4 equal miners among 14: largest over smallest"
    most = f"three by {ratio_of('muon', 1024, three)}, four among fourteen by {ratio_of('muon', 1024, four)}"
    assert f"**Equal miners** differ most with Muon: {most}" in text
    norm, repeater = over.format("large norm"), over.format("repeater")
    overfitter, wrong = over.format("overfitter"), over.format("wrong pages")
    assert f"With Muon it has only {ratio_of('muon', 1024, norm)}, and with single bytes" in text
    found = [median_of("muon", 1024, what) for what in (repeater, overfitter)]
    assert "With Muon they have {} and {} of the credit of 64 sequences in the median".format(*found) in text
    singles = [median_of("muon", 256, what) for what in (repeater, overfitter)]
    assert "With single bytes they have {} and {} there".format(*singles) in text
    assert f"more useful in every span: {ratio_of('muon', 1024, wrong)}" in text


def test_what_the_page_says_of_single_bytes() -> None:
    text, used = prose("Single bytes"), SCRIPT["USED"]
    for scheme, name in SCRIPT["SCHEMES"].items():
        [middle, worst] = [median_of(scheme, 256, used[scheme], "rank correlation", one) for one in "ab"]
        assert re.search(rf"{middle} \(worst {worst}, {name}\)", text)
        assert f"{name} {middle} (worst {worst})" in prose("How well the product foretells the loss")
    for what in (
        "3 equal miners: largest over smallest",
        "4 identical clones, over an honest miner",
        "its victim, over other honest ones",
        "64 over 24 sequences",
    ):
        for scheme in SCRIPT["SCHEMES"]:
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
    found = [float(row["a"]) for row in ROWS if (row["table"], row["what"]) == ("credit as paid, power 1", what)]
    assert len(found) == 6  # three schemes, each with both vocabularies
    quoted = f"{min(found):.2f} to {max(found):.2f}"
    for text in ((ROOT / "docs" / "scoring.md").read_text(), credit.__doc__ or ""):
        assert quoted in text
    factors = [row for row in ROWS if (row["table"], row["what"]) == ("own pages, 13 updates", "copier with noise")]
    assert len(factors) == 6
    assert round(max(float(row["b"]) for row in factors), 2) <= 0.02
    assert {float(row["d"]) for row in factors} == {0.0}  # the 90 % quantile

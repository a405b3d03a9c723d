"""Measured figures that texts quote are those of docs/benchmarks/predicted_gain.csv."""

import csv
from pathlib import Path

from tplr.scoring import credit

ROOT = Path(__file__).parents[2]
with (ROOT / "docs" / "benchmarks" / "predicted_gain.csv").open() as file:
    ROWS = list(csv.DictReader(file))


def test_the_credit_of_a_copy_with_noise_is_not_said_to_be_nothing() -> None:
    """Credit alone leaves it a part; the own-pages factor is what makes its pay 0."""
    what = "copier with noise, over an honest miner"
    found = [float(row["a"]) for row in ROWS if (row["table"], row["what"]) == ("credit, power 1", what)]
    assert len(found) == 5  # three schemes, two of them with single bytes too
    quoted = f"{min(found):.2f} to {max(found):.2f}"
    for text in ((ROOT / "docs" / "scoring.md").read_text(), credit.__doc__ or ""):
        assert quoted in text
    factors = [row for row in ROWS if (row["table"], row["what"]) == ("own pages, 13 updates", "copier with noise")]
    assert len(factors) == 5
    assert max(float(row["b"]) for row in factors) < 0.02
    assert {float(row["d"]) for row in factors} == {0.0}  # the 90 % quantile

"""The published table of attacks can be made in parts, has a row for each target, and shows the published runs."""

import runpy
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tplr.localnet.scenarios import SCENARIOS
from tplr.localnet.targets import TARGETS

ROOT = Path(__file__).parents[2]
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS += ("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen")


@pytest.fixture
def script(tmp_path: Path) -> dict[str, Any]:
    """The script, whose pages are copies."""
    names = runpy.run_path(str(ROOT / "scripts" / "simulate_attackers.py"))
    copies = {}
    for page in ("TABLE", "PAGE"):
        copies[page] = tmp_path / names[page].name
        copies[page].write_text(names[page].read_text())
    names["write"].__globals__.update(copies)
    return names | copies


def test_a_target_is_a_row_of_the_table(script: dict[str, Any]) -> None:
    """A renamed figure would lose its bound."""
    rows = script["published"](script["TABLE"].read_text())
    assert {target.figure for target in TARGETS} <= rows.keys()


def test_cells_are_those_of_the_published_runs(script: dict[str, Any]) -> None:
    """Older figures, whose runs are not kept, are not compared."""
    runs = defaultdict(list)
    for (scenario, setting), figures in script["load"](script["RESULTS"]).items():
        if scenario in script["SCENARIOS"]:
            runs[setting.scheme, setting.vocabulary].append(figures)
    expected = script["measured"](runs)
    assert expected
    rows = script["published"](script["TABLE"].read_text())
    found = {figure: {column: rows.get(figure, {}).get(column) for column in row} for figure, row in expected.items()}
    assert found == expected


def test_new_results_change_their_cells_alone(script: dict[str, Any]) -> None:
    before = script["TABLE"].read_text()
    script["write"]({})
    assert script["TABLE"].read_text() == before
    runs = {("muon", 1024): [{"go dark": 0.25}, {"go dark": 0.5}], ("new", 256): [{"a new figure": 1.0}]}
    script["write"](script["measured"](runs))
    old, new = script["published"](before), script["published"](script["TABLE"].read_text())
    assert new.pop("a new figure")["new, 256"] == "1.00 (1.00 to 1.00)"
    assert new["go dark"].pop("muon, 1024") == "**0.38, 0.50**"
    assert old["go dark"].pop("muon, 1024") == "0.00, 0.00"
    assert {row.pop("new, 256") for row in new.values()} == {"-"}
    assert new == old
    assert before.partition(script["END"])[2] == script["TABLE"].read_text().partition(script["END"])[2]


def test_the_page_quotes_the_table(script: dict[str, Any]) -> None:
    """``write`` without new results, tested above to leave the table as it is, changes no quote either."""
    before = script["PAGE"].read_text()
    script["write"]({})
    assert script["PAGE"].read_text() == before
    assert len(script["QUOTE"].findall(before)) > len(SCENARIOS)
    script["write"]({"go dark": {script["QUOTED"]: "0.99, 0.99"}})
    assert script["PAGE"].read_text() == before.replace("<!-- go dark -->0.00, 0.00", "<!-- go dark -->0.99, 0.99")


def test_the_text_counts_the_missed_targets(script: dict[str, Any]) -> None:
    rows, text = script["published"](script["TABLE"].read_text()).values(), " ".join(script["PAGE"].read_text().split())

    def missed(column: str) -> str:
        return NUMBERS[sum("**" in row[column] for row in rows)]

    assert f"**With 1024 tokens the default misses {missed('muon, 1024')} targets**" in text
    assert (
        f"With 1024 tokens DeMo misses {missed('demo, 1024')}, of which two are majorities of tenfold norm, and "
        f"SparseLoCo {missed('sparseloco, 1024')}." in text
    )
    assert f"With single bytes it misses {missed('muon, 256')}: " in text
    assert f"With single bytes they miss {missed('demo, 256')} and {missed('sparseloco, 256')}, " in text

"""``docs/costs.md`` has the planner's current figures."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "cost_tables.py"))
    assert script["PAGE"].read_text() == script["page"](), "run scripts/cost_tables.py"
    named = {path.name for path in ROOT.glob("hparams*.json")}
    assert all(f"| `{name}` |" in script["PAGE"].read_text() for name in named)

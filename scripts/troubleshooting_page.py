"""Write ``docs/troubleshooting.md`` from ``scripts/troubleshooting.toml``: log lines, their causes and remedies.

    .venv/bin/python scripts/troubleshooting_page.py

``tests/test_troubleshooting.py`` compares the table with the source, and the page with the table.
"""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "scripts" / "troubleshooting.toml"
PAGE = ROOT / "docs" / "troubleshooting.md"
TEXT = """# Troubleshooting

Every warning, error and critical line that a node logs while it runs, with its cause and what to do. A capital letter
or `…` stands for a value. Lines that are not here are information. Start with `tplr doctor` and the newest line of
level ERROR. This page is written by `scripts/troubleshooting_page.py`; a test compares it with the source in both
directions.

`tplr join` and the start-up checks list their problems in a table, each with its remedy; those are not repeated here.
What an exit status means is in [services.md](services.md), what an alert means in [monitoring.md](monitoring.md).
"""
COLUMNS = "| log line | cause | remedy |\n|---|---|---|"


def sections() -> list[dict[str, Any]]:
    """Read the sections of the table: ``title``, and in ``line`` the ``log``, ``cause`` and ``remedy`` of each log
    line."""
    return tomllib.loads(TABLE.read_text())["section"]


def page() -> str:
    """Return the text of the page."""
    text = TEXT
    for section in sections():
        rows = [f"| `{line['log']}` | {line['cause']} | {line['remedy']} |" for line in section["line"]]
        text += "\n".join(["", f"## {section['title']}", "", COLUMNS, *rows, ""])
    return text


if __name__ == "__main__":
    PAGE.write_text(page())

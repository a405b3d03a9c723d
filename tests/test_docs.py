"""The guides against the source: every quoted log line exists, every link leads somewhere, every term is defined.

A guide quotes log lines in two ways: in the first column of a table whose header is ``log line``, and in code blocks
as the log prints them (``12:58:29 INFO    miner 1            text``). A capital letter, a number, ``[…]`` and ``…``
stand for values.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
VALUE = re.compile(r"[A-Z]|\d+|\[…\]|…")
PRINTED = re.compile(r"^\d\d:\d\d:\d\d (?:INFO|WARNING|ERROR|CRITICAL) +\w+(?: \d+)? {2,}(?P<line>.*)$")
MIN_LETTERS = 6  # of a format string, because "%s: %s" alone matches everything


def quoted(text: str) -> Iterator[str]:
    """Yield the log lines that a guide quotes."""
    in_table = False
    for line in text.splitlines():
        if line.startswith("| log line |"):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and (cell := re.match(r"\| `([^`]*)` \|", line)):
            yield cell[1]
        if printed := PRINTED.match(line):
            yield printed["line"]


@functools.cache  # computed at the first use, because every test process collects this file
def format_strings() -> set[tuple[str, ...]]:
    """Return every string of ``src`` that is not a docstring, as the pieces between its values."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "%s" for part in node.values]
                skipped |= {id(part) for part in node.values}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node.value]
            else:
                continue
            text = "".join(map(str, parts))
            if sum(map(str.isalpha, re.sub(r"%[-+.\d]*\w", "", text))) >= MIN_LETTERS:
                found.add(tuple(re.split(r"%[-+.\d]*[sdfgr]", text)))
    return found


def is_logged(line: str) -> bool:
    """Return whether some format string gives ``line``; each of its values is a placeholder or such a line itself."""
    return any(
        all(VALUE.fullmatch(value) or is_logged(value) for value in found.groups())
        for pieces in format_strings()
        if all(piece in line for piece in pieces)  # few remain, for which a pattern is compiled
        and (found := re.fullmatch("(.+)".join(map(re.escape, pieces)), line))
    )


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_quoted_log_line_is_in_the_source(guide: Path):
    assert [line for line in quoted(guide.read_text()) if not is_logged(line)] == []


def test_the_guides_of_nodes_quote_log_lines():
    for name in ("miner", "validator", "aggregator"):
        assert len(list(quoted((ROOT / "docs" / f"{name}.md").read_text()))) >= 3


@pytest.mark.parametrize("line", ["window W missed", "uid U: update refused: …", "window W missed: no reason", "…"])
def test_a_line_that_no_code_logs_is_found(line: str):
    assert not is_logged(line)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_link_to_a_file_leads_somewhere(guide: Path):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", guide.read_text())
    assert [target for target in targets if not (guide.parent / target).exists()] == []


def test_the_glossary_is_sorted_and_linked():
    terms = re.findall(r"^\| \*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert len(terms) >= 20
    assert terms == sorted(terms, key=str.lower)
    for guide in (ROOT / "README.md", ROOT / "docs" / "architecture.md"):
        assert "glossary.md)" in guide.read_text()

"""The troubleshooting table has every line of level warning or above that a running node logs, and no other.

``docs/troubleshooting.md`` is written from it. ``test_docs.py`` checks that each line of the page is in the source;
this file checks the other direction.
"""

import ast
import functools
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tplr"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "troubleshooting_page.py"))
LINES = [line for section in SCRIPT["sections"]() for line in section["line"]]
QUOTED = [line["log"] for line in LINES]
# Modules that a node runs. ``audit`` is a command whose lines are its output.
OF_A_NODE = ["chain", "comms", "disk_cache.py", "exchange", "node", "pages", "storage", "telemetry", "training"]
NO_NODE = {"node/audit.py"}
LEVELS = ("warning", "error", "critical", "exception")
VALUE = re.compile(r"%[-+.\d]*[sdfgr]")


def logged() -> Iterator[tuple[str, str]]:
    """Yield place and format string of each call; a format string that is only a value has its text elsewhere."""
    for path in sorted(SOURCE.rglob("*.py")):
        place = str(path.relative_to(SOURCE))
        if place.partition("/")[0] not in OF_A_NODE or place in NO_NODE:
            continue
        if "logger" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                if getattr(node.func.value, "id", "") != "logger" or not isinstance(node.args[0], ast.Constant):
                    continue
                text = str(node.args[0].value)
                if any(map(str.isalpha, VALUE.sub("", text))):
                    yield f"{place}:{node.lineno}", text


@functools.cache  # computed at the first use, because every test process collects this file
def calls() -> list[tuple[str, str]]:
    return list(logged())


def test_the_page_is_up_to_date() -> None:
    assert SCRIPT["PAGE"].read_text() == SCRIPT["page"](), "run scripts/troubleshooting_page.py"


def test_each_line_has_all_three_on_one_row() -> None:
    for line in LINES:
        assert line.keys() == {"log", "cause", "remedy"}
        assert all(text and not set(text) & set("|\n") for text in line.values()), line


def test_the_calls_were_found() -> None:
    assert len(calls()) > 40
    assert all((SOURCE / name).exists() for name in OF_A_NODE)


def test_every_line_has_a_cause_and_a_remedy() -> None:
    def is_quoted(text: str) -> bool:
        pattern = re.compile("(.+)".join(map(re.escape, VALUE.split(text))))
        return any(pattern.fullmatch(line) for line in QUOTED)

    assert [(place, text) for place, text in calls() if not is_quoted(text)] == []


def test_no_line_is_explained_twice() -> None:
    assert len(QUOTED) == len(set(QUOTED))

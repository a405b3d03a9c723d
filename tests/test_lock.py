"""``requirements.lock`` is complete and pinned: the image installs the tested versions."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
PINS = dict(re.findall(r"^([a-z0-9._-]+)==(\S+) \\$", LOCK, re.M))
CONSTRAINTS = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_of_a_node_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["metrics"]]
    assert {canonical(re.split(r"[^A-Za-z0-9._-]", one)[0]) for one in needed} <= {canonical(name) for name in PINS}


def test_versions_are_those_of_the_tests() -> None:
    tested = {canonical(name): version for name, version in CONSTRAINTS.items()}
    other = {name: (pin, tested[name]) for name, pin in PINS.items() if tested.get(canonical(name), pin) != pin}
    assert other == {}


def test_every_package_has_hashes() -> None:
    blocks = re.split(r"^(?=[a-z0-9])", LOCK, flags=re.M)[1:]
    assert len(blocks) == len(PINS) > 50
    assert [block.split(" ")[0] for block in blocks if "--hash=sha256:" not in block] == []


def test_it_names_no_index() -> None:
    assert not re.search(r"https?://|--(extra-)?index|--find-links", LOCK)

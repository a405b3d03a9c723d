"""Declared dependencies: all imports of ``src`` are declared, all declared ones are imported, extras are optional."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USER_EXTRAS = ("localnet", "h5", "eval", "metrics", "wandb", "ray")  # the others are for development


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", text)[0].lower().replace("_", "-") for text in requirements}


RUNTIME = names(PROJECT["dependencies"])
OPTIONAL = {name for extra in USER_EXTRAS for name in names(PROJECT["optional-dependencies"][extra])}


def imports(node: ast.AST) -> Iterator[str]:
    """Yield the modules that a statement imports by absolute name, also by ``import_module``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
        yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))


@functools.cache
def trees() -> dict[Path, ast.Module]:
    paths = [*(ROOT / "src").rglob("*.py"), *(ROOT / "neurons").glob("*.py")]
    return {path: ast.parse(path.read_text()) for path in paths}


distributions = functools.cache(packages_distributions)


@functools.cache
def imported(*, at_import: bool) -> dict[str, set[str]]:
    """Return distribution -> files that import it; with ``at_import`` only imports at the file's import."""
    found: dict[str, set[str]] = {}
    for path, tree in trees().items():
        for node in tree.body if at_import else ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):  # of a million nodes
                continue
            for module in imports(node):
                top = module.split(".")[0]
                if top not in sys.stdlib_module_names and top != "tplr":
                    # A package that is not installed here is named like its module.
                    name = distributions().get(top, [top])[0].lower().replace("_", "-")
                    found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def test_what_is_imported_is_declared():
    missing = {name: files for name, files in imported(at_import=False).items() if name not in RUNTIME | OPTIONAL}
    assert missing == {}


def test_what_is_declared_is_imported():
    assert imported(at_import=False).keys() >= RUNTIME | OPTIONAL


def test_what_an_extra_installs_is_imported_only_on_use():
    assert {name: files for name, files in imported(at_import=True).items() if name in OPTIONAL - RUNTIME} == {}


def test_the_development_extras_contain_those_of_users():
    def closure(extra: str) -> set[str]:
        needed = {extra}
        for text in PROJECT["optional-dependencies"][extra]:
            if inner := re.fullmatch(r"tplr\[(.*)\]", text):
                needed |= {one for name in inner[1].split(",") for one in closure(name)}
        return needed

    assert closure("dev") == set(PROJECT["optional-dependencies"])
    assert {"localnet", "h5", "ray"} <= closure("test")


def test_every_declared_dependency_is_pinned():
    pinned = names((ROOT / "constraints.txt").read_text().splitlines())
    extras = {name for extra in PROJECT["optional-dependencies"].values() for name in names(extra)}
    assert (RUNTIME | extras) - {"tplr"} <= pinned


@pytest.mark.parametrize(("script", "extra"), [("localnet.sh", "localnet"), ("test.sh", "test"), ("check.sh", "dev")])
def test_each_script_installs_what_it_runs(script: str, extra: str):
    assert re.search(rf'setup\.sh"? {extra}\b', (ROOT / "scripts" / script).read_text())

"""Every source file with logic has a test of the same name, or ``tests/README.md`` says where it is tested."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "tplr"
README = TESTS / "README.md"
# | `source` | `test`, `test` |
ROW = re.compile(r"^\| `([^`]+\.py)` \| (.+) \|$", re.MULTILINE)


# The environment is read in ``tplr.config``. Its default number of workers is below that in the order of imports.
READ_VARIABLES = ["config.py", "resources.py"]
# Entry points, and functions for programs without a node.
READ_ENVIRONMENT = [
    "cli/data/location.py",
    "comms/buckets.py",
    "comms/neuron.py",
    "doctor.py",
    "join/init.py",
    "node/main.py",
    "node/network_reader.py",
    "r2_dataset.py",
    "storage/blocking.py",
    "storage/s3.py",
    "stores/preprocess/pipeline.py",
    "streams/shard_by_rank.py",
]


def rows() -> dict[str, list[str]]:
    """Return source file → its tests, from the table of the README."""
    return {source: re.findall(r"`([^`]+)`", tests) for source, tests in ROW.findall(README.read_text())}


def has_logic(path: Path) -> bool:
    """Return whether any function of the file has logic; protocols and constants have none."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)]
    statements = [statement for body in bodies for statement in body]
    return not all(isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in statements)


def mirror(source: Path) -> Path:
    """``src/tplr/room/name.py`` → ``tests/room/test_name.py``."""
    return TESTS / source.relative_to(SOURCE).parent / f"test_{source.stem.strip('_')}.py"


def test_every_source_file_is_tested_somewhere() -> None:
    listed = rows()
    missing = [
        f"| `{source.relative_to(SOURCE)}` | `WHERE` |"
        for source in sorted(SOURCE.rglob("*.py"))
        if not mirror(source).exists() and str(source.relative_to(SOURCE)) not in listed and has_logic(source)
    ]
    assert not missing, "\n".join(["add test files of the same names, or these rows to tests/README.md:", *missing])


def test_the_table_names_files_that_exist_and_have_no_test_of_their_name() -> None:
    listed = rows()
    superfluous = [one for one in listed if not (SOURCE / one).exists() or mirror(SOURCE / one).exists()]
    assert not superfluous, "\n".join(["delete these rows of tests/README.md:", *superfluous])
    named = {test for tests in listed.values() for test in tests}
    gone = [test for test in sorted(named) if not (TESTS / test).exists()]
    assert not gone, "\n".join(["tests/README.md names tests that do not exist:", *gone])


def test_the_table_is_sorted() -> None:
    listed = [source for source, _ in ROW.findall(README.read_text())]
    assert listed == sorted(set(listed))


def test_the_environment_is_read_at_entry_points_alone() -> None:
    text = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    assert sorted(name for name in text if re.search(r"\benviron\b|getenv", text[name])) == READ_VARIABLES
    assert sorted(name for name in text if "Environment.read(" in text[name]) == READ_ENVIRONMENT


def test_tests_that_sources_and_scripts_name_exist() -> None:
    root = TESTS.parent
    files = [path for folder in ("src", "scripts", "docker", "docs") for path in (root / folder).rglob("*.*")]
    named = {
        name
        for path in files
        if path.suffix in (".py", ".sh", ".md", ".yml")
        for name in re.findall(r"\btests/[a-z_/0-9]+\.py\b", path.read_text())
    }
    assert len(named) > 30
    assert [name for name in sorted(named) if not (root / name).exists()] == []

"""``scripts/simulate_network.py``: the same arguments write the same bytes."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate_network.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_network", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    script = _script()
    arguments = ["--size", "1B", "--uids", "40", "--validators", "5", "--windows", "4", "--assume", "crash=0.01"]
    for name in ("first", "second"):
        args = script.parse([*arguments, "--out", str(tmp_path / name)])
        script.write(args, script.simulate(args))
    for name in ("windows.csv", "summary.json", "windows.png"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    figures = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert figures["windows"] == 4
    assert len((tmp_path / "first" / "windows.csv").read_text().splitlines()) == 5

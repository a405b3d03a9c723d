"""Old names are answered with the new ones, all at once, and the guide has the same table."""

import json
import re
from pathlib import Path

import pytest

from tplr.cli import main
from tplr.errors import ConfigError
from tplr.hparams import DocumentedScores, HParams, load_hparams
from tplr.localnet.plan import scheme_constants
from tplr.migration import ARGUMENTS, HPARAMS

ROOT = Path(__file__).parents[1]


def test_every_old_key_is_answered_at_once(tmp_path: Path) -> None:
    raw = scheme_constants("demo") | dict.fromkeys(HPARAMS, 1) | {"bach_size": 1}
    (tmp_path / "hparams.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as caught:
        load_hparams(tmp_path / "hparams.json")
    told = [problem.partition("hparams.json: ")[2] for problem in caught.value.problems]
    expected = [
        f"{key} is an old key; write instead: {new} (docs/migration.md lists all)" for key, new in HPARAMS.items()
    ]
    assert sorted(told) == sorted([*expected, "bach_size is not a known key; remove it or correct its spelling"])


def test_every_new_key_exists() -> None:
    raw = scheme_constants("demo")
    raw |= {"sparseloco": json.loads((ROOT / "hparams-sparseloco.json").read_text())["sparseloco"]}
    raw |= {"documented_scores": DocumentedScores().model_dump()}
    raw["model"] |= {"rope_parameters": {"rope_theta": 500_000.0}}
    HParams.model_validate(raw | {"sparseloco": None})
    assert not HPARAMS.keys() & HParams.model_fields.keys()
    for new in HPARAMS.values():
        value = raw
        for step in [] if " " in new else new.split("."):
            value = value[step]


@pytest.mark.parametrize("command", ["miner", "validator", "aggregator"])
def test_every_old_argument_is_answered_at_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"{name}=x" if "endpoint" in name else name for name in ARGUMENTS]
    with pytest.raises(SystemExit) as ended:
        main([command, "--project", "templar", *given, "--nonsense"])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    for name, new in ARGUMENTS.items():
        assert re.search(rf"^  {re.escape(name)} +-> {re.escape(new)}$", told, re.MULTILINE)
    assert told.count("->") == len(ARGUMENTS)
    assert "docs/migration.md" in told


@pytest.mark.parametrize("new", [new for new in ARGUMENTS.values() if new.startswith("--")])
def test_every_new_argument_exists(new: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["miner", "--help"])
    assert new.split(maxsplit=1)[0] in capsys.readouterr().out


def test_the_guide_has_every_row() -> None:
    text = (ROOT / "docs" / "migration.md").read_text()
    rows = {old: new.replace("`", "") for old, new in re.findall(r"^\| `(.+?)` \| (.+) \|$", text, re.MULTILINE)}
    assert rows == HPARAMS | ARGUMENTS

"""Paths with ``~``: the home folder, and an error that names the path if no home folder is known."""

from pathlib import Path

import pytest

from tplr.chain.hotkeys import load_hotkey
from tplr.cli import parse_arguments
from tplr.data import CheckpointableDataset
from tplr.errors import ConfigError, DataError
from tplr.home_paths import expanded

UNKNOWN = "no home folder is known for ~no-such-user: give the whole path"


def test_the_home_folder_replaces_the_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert expanded(Path("~/x")) == Path("/home/somebody/x")
    assert expanded(Path("/a/~/x")) == Path("/a/~/x")
    assert parse_arguments(["localnet", "--run-dir", "~/run"]).run_dir == Path("/home/somebody/run")


@pytest.mark.parametrize(
    "line",
    [
        ["localnet", "--corpus"],
        ["localnet", "--run-dir"],
        ["miner", "--state"],
        ["miner", "--wallet.path"],
    ],
)
def test_an_unknown_user_on_the_command_line(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([*line, "~no-such-user/x"])
    assert f"argument {line[-1]}: ~no-such-user/x: {UNKNOWN}" in capsys.readouterr().err


def test_an_unknown_user_of_a_wallet() -> None:
    with pytest.raises(ConfigError, match=f"--wallet.path is ~no-such-user/x: {UNKNOWN}"):
        load_hotkey("~no-such-user/x", "w", "h")


def test_an_unknown_user_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("~no-such-user/x.jsonl", "~no-such-user/*.jsonl"):
        with pytest.raises(DataError, match=UNKNOWN):
            next(CheckpointableDataset.from_files(name).iter())
    (tmp_path / "~no-such-user.jsonl").write_text('{"a": 1}\n')
    monkeypatch.chdir(tmp_path)
    assert list(CheckpointableDataset.from_files("*.jsonl")) == [{"a": 1}]

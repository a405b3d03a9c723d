"""The command line: what exists, what is refused, and how that ends."""

import subprocess
import sys

import pytest

from tplr.cli import main


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "tplr 0.1.0\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["localnet", "--mayhem"], ["localnet", "--miners", "three"]])
def test_what_is_not_understood_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: tplr" in capsys.readouterr().err


def test_all_that_is_wrong_with_a_localnet_is_said_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["localnet", "--miners", "0", "--port", "70000"]) == 2
    told = capsys.readouterr().err
    assert "--miners 0" in told
    assert "--port 70000" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", ["miner", "validator"])
def test_nodes_have_the_arguments_of_their_scripts(role, capsys):
    with pytest.raises(SystemExit) as ended:
        main([role, "--help"])
    assert ended.value.code == 0
    assert f"usage: {role}" in capsys.readouterr().out


def test_asking_for_help_loads_nothing_heavy():
    code = (
        "import sys, tplr.cli\ntry: tplr.cli.main(['localnet', '--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0

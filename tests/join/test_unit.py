"""The units: systemd accepts them, parses the command as intended, and restarts only after failures that may pass."""

import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tplr.join.unit import Unit, install, standard_unit, start, units_folder
from tplr.node.checks import MISCONFIGURED, OUTDATED, OUTSIDE_DOWN

SHIPPED = Path(__file__).parents[2] / "docker" / "systemd"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def unit(folder: Path, *, user: str | None = "daemon") -> Unit:
    command = ["/bin/true", "--name", 'a "b" 100%', "--path", "/x y/$HOME;z"]
    return Unit(name="tplr-test-miner", description="a 100% test", command=command, folder=folder, user=user)


def verified(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)


@needs_systemd
@pytest.mark.parametrize("user", ["daemon", None])
def test_systemd_accepts_it(tmp_path: Path, user: str | None) -> None:
    install(unit(tmp_path, user=user), tmp_path)
    done = verified(tmp_path / "tplr-test-miner.service")
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_it_is_hardened(tmp_path: Path) -> None:
    install(unit(tmp_path), tmp_path)
    path = tmp_path / "tplr-test-miner.service"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-400:]


def test_what_systemd_expands_is_escaped(tmp_path: Path) -> None:
    text = unit(tmp_path).text()
    [command] = re.findall("^ExecStart=(.*)$", text, re.M)
    assert command == '/bin/true --name "a \\"b\\" 100%%" --path "/x y/$$HOME;z"'
    assert "Description=a 100%% test\n" in text


def test_each_part_of_a_command_stays_one_part(tmp_path: Path) -> None:
    made = replace(unit(tmp_path), command=["/bin/true", "--archive", "", "--path", "/a\tb"])
    [command] = re.findall("^ExecStart=(.*)$", made.text(), re.M)
    assert shlex.split(command) == made.command


@needs_systemd
def test_a_folder_with_a_space_a_dollar_and_a_percent_sign_is_named_as_it_is(tmp_path: Path) -> None:
    """systemd expands variables only in command lines."""
    for folder in (Path("/var/lib/my $run/100%"), tmp_path / "my $run" / "100%"):
        folder.mkdir(parents=True) if folder.is_relative_to(tmp_path) else None
        place = folder.relative_to("/var/lib") if folder.is_relative_to("/var/lib") else folder
        text = unit(folder).text()
        key = "StateDirectory" if place != folder else "ReadWritePaths"
        assert re.findall(f"^{key}=(.*)$", text, re.M) == ['"' + str(place).replace("%", "%%") + '"']
        assert f'Environment="TPLR_CACHE_FOLDER={folder}/cache/tplr"'.replace("%", "%%") in text
        install(unit(folder), tmp_path)
        done = verified(tmp_path / "tplr-test-miner.service")
        assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    text = unit(tmp_path).text()
    assert f"\nRestartPreventExitStatus={MISCONFIGURED} {OUTDATED}\n" in text
    assert str(OUTSIDE_DOWN) not in re.findall("^RestartPreventExitStatus=(.*)$", text, re.M)
    assert text.index("StartLimitIntervalSec=0") < text.index("[Service]")  # systemd ignores it elsewhere


def test_the_users_own_manager_gets_no_rights_it_does_not_have(tmp_path: Path) -> None:
    text = unit(tmp_path, user=None).text()
    assert "User=" not in text
    assert "CapabilityBoundingSet" not in text
    assert "WantedBy=default.target" in text
    assert install(unit(tmp_path, user=None), tmp_path)[0] == "systemctl --user daemon-reload"


def test_without_systemd_nothing_is_started(tmp_path: Path) -> None:
    if Path("/run/systemd/system").is_dir():
        pytest.skip("systemd runs here")
    assert not start(["false"])
    assert units_folder().name in ("system", "user")


@pytest.mark.parametrize("role", ["miner", "validator", "aggregator"])
def test_the_shipped_units_are_these(role: str) -> None:
    expected = standard_unit(role)
    assert (SHIPPED / f"{expected.name}.service").read_text() == expected.text()


@needs_systemd
@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.service")), ids=lambda path: path.stem)
def test_systemd_accepts_the_shipped_units(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace("/opt/templar/.venv/bin/tplr", "/bin/true"))  # it looks for the program
    done = verified(copy)
    assert (done.returncode, done.stderr) == (0, "")

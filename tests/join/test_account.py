"""Root acts as another account, whose files and links then get no more than that account has."""

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tplr.errors import ConfigError
from tplr.join.account import acting_as, service_account

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")
NOBODY = pwd.getpwnam("nobody")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of that account, not in a folder that only root may enter."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # TMPDIR may be private
        os.chown(name, NOBODY.pw_uid, NOBODY.pw_gid)
        yield Path(name)


def test_the_account_is_that_of_the_folder_or_of_the_one_above(folder: Path, tmp_path: Path) -> None:
    assert service_account(folder) == service_account(folder / "not/there") == NOBODY
    assert service_account(tmp_path) == pwd.getpwuid(0)
    os.chown(folder, 54321, 54321)
    with pytest.raises(ConfigError, match="its owner has no user name: chown it"):
        service_account(folder)


def test_a_link_gains_nothing_and_what_is_written_is_the_account_s(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/sh")  # that of these tests may be in the home of root
    (tmp_path / "secret").write_text("of root")
    (folder / "link").symlink_to(tmp_path / "secret")
    groups = os.getgroups()
    with acting_as(NOBODY):
        with pytest.raises(PermissionError):
            (folder / "link").read_text()
        (folder / "new").touch()
        ids = "id -u; id -ru; id -G"
        done = subprocess.run(
            ["sh", "-c", ids], check=True, user=NOBODY.pw_uid, group=NOBODY.pw_gid, capture_output=True, text=True
        )
    assert (folder / "new").stat().st_uid == NOBODY.pw_uid
    own = os.getgrouplist(NOBODY.pw_name, NOBODY.pw_gid)
    assert [*map(int, done.stdout.split())] == [NOBODY.pw_uid, NOBODY.pw_uid, *own]
    assert (os.geteuid(), os.getegid(), os.getgroups()) == (0, os.getgid(), groups)
    assert (folder / "link").read_text() == "of root"


def test_a_program_that_the_account_cannot_read_is_no_service(folder: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "python").touch(mode=0o755)  # in a folder of root that nobody else may enter
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"Permission denied for nobody, .* install templar where"), acting_as(NOBODY):
        pass
    assert os.geteuid() == 0

"""``.env`` files: every reader gets the same values, other users cannot read them, and no file is lost."""

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tplr.errors import ConfigError
from tplr.join.env_file import read_env_file, write_env_file

VALUES = {
    "R2_GRADIENTS_ACCOUNT_ID": "a" * 32,
    "R2_DATASET_BUCKET_LIST": '[{"name": "x y", "credentials": {}}]',
    "ODD": "#a $b `c` ;d !e",
    "EMPTY": "",
}


def test_it_is_read_back_and_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / ".env"
    write_env_file(path, VALUES, comment="of a test")
    assert read_env_file(path) == VALUES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == [".env"]
    assert read_env_file(tmp_path / "none") == {}


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_a_shell_reads_the_same(tmp_path: Path) -> None:
    write_env_file(tmp_path / ".env", VALUES, comment="of a test")
    script = "set -a; . ./.env; " + " ".join(f'printf "%s\\n" "${name}";' for name in VALUES)
    said = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout.split("\n")[:-1] == list(VALUES.values())


def test_what_was_there_is_kept_beside_it(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("A=1\n")
    write_env_file(path, {"A": "2"}, comment="of a test")
    write_env_file(path, {"A": "2"}, comment="of a test")
    assert (tmp_path / ".env.old").read_text() == "A=1\n"
    assert stat.S_IMODE((tmp_path / ".env.old").stat().st_mode) == 0o600


def test_what_a_link_points_to_is_not_copied(tmp_path: Path) -> None:
    """Root may write the file, in a folder whose owner may not read what the link points to."""
    path, secret = tmp_path / "node/.env", tmp_path / "shadow"
    path.parent.mkdir()
    secret.write_text("root:secret\n")
    path.symlink_to(secret)
    write_env_file(path, {"A": "2"}, comment="of a test")
    assert read_env_file(path) == {"A": "2"}
    assert not path.is_symlink()
    assert (path.parent / ".env.old").readlink() == secret
    assert secret.read_text() == "root:secret\n"


@pytest.mark.parametrize("value", ["it's", "a\nB=1", "back\\slash", "${HOME}"])
def test_a_value_that_readers_see_differently_is_refused_without_showing_it(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"^A: ") as raised:
        write_env_file(tmp_path / ".env", {"A": value}, comment="of a test")
    assert value not in str(raised.value)
    assert not (tmp_path / ".env").exists()

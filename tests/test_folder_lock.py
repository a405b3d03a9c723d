"""A folder has one user at a time; ``stores/preprocess/test_output_lock.py`` locks it with real processes."""

import fcntl
import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tplr.errors import ConfigError
from tplr.folder_lock import sole_user


def locked(folder: Path) -> AbstractContextManager[None]:
    return sole_user(folder, ".lock", what="output", remedy="wait until it ends")


def test_the_lock_survives_its_removal_by_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opened the file just before its holder removed it locks a new file, not the removed one."""
    flock, removed = fcntl.flock, []

    def late(file, operation) -> None:
        flock(file, operation)
        if not removed:
            removed.append(os.fstat(file.fileno()).st_ino)
            (tmp_path / "out" / ".lock").unlink()

    monkeypatch.setattr(fcntl, "flock", late)
    refused = f"output {tmp_path}/out: process {os.getpid()} on .* uses it; wait until it ends"
    with locked(tmp_path / "out"), pytest.raises(ConfigError, match=refused), locked(tmp_path / "out"):
        pass
    assert not [*(tmp_path / "out").iterdir()]


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ConfigError, match="out can't be locked: File exists"), locked(tmp_path / "out"):
        pass

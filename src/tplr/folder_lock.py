"""Lets one process at a time use a folder. The lock ends with its process, even if that is killed."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tplr.errors import ConfigError


@contextmanager
def sole_user(folder: Path, lock: str, *, what: str, remedy: str) -> Iterator[None]:
    """Lock ``folder``, created if absent, while the block runs.

    Args:
        lock: name of the lock file in the folder.
        what: the folder's purpose, for errors.
        remedy: what to do while another process uses the folder, for the error.

    Raises:
        ConfigError: another process holds it, or it can't be written.
    """
    path = folder / lock
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while (file := _locked(path, f"{what} {folder}", remedy)) is None:
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    except OSError as error:
        raise ConfigError(f"{what} {folder} can't be locked: {error.strerror}") from error
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path, name: str, remedy: str) -> TextIO | None:
    """Open and lock the lock file; None if its holder removed it meanwhile. Raises ConfigError if another holds it."""
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read() or "another process"
        raise ConfigError(f"{name}: {holder} uses it; {remedy}") from error
    except FileNotFoundError:
        pass
    file.close()
    return None

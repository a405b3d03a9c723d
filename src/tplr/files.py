"""Atomic writes: a file, or a folder, is written under a temporary name, synced, and renamed."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tplr.errors import StateError


@contextlib.contextmanager
def atomic_writer(path: Path, *, create_only: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path``; rename it there when the block ends well, remove it otherwise.

    A reader, and a process killed at any moment, sees the old file or the new one, never a part. Of several writers
    at once the last wins, or with ``create_only`` the first.

    Raises:
        FileExistsError: ``create_only``, and ``path`` exists.
        StateError: the disk is full or not writable; ``path`` is as it was.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if create_only:
            path.hardlink_to(temporary)
        else:
            temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        if create_only and isinstance(error, FileExistsError) and path.exists():
            raise
        raise write_error(path, error) from error
    finally:
        # After the rename there is nothing to remove. On a full disk the removal may fail, which does no harm.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_error(path: Path, error: OSError) -> StateError:
    """The error for ``path``, which could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StateError(f"can't write {path}: the disk is full ({error.strerror}): free some space")
    if error.errno == errno.EFBIG:
        return StateError(f"can't write {path}: {error.strerror} for this process or file system: see ulimit -f")
    return StateError(f"can't write {path}: {error.strerror or error}: check the folder")


def atomic_write(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` atomically. Raises as ``atomic_writer``."""
    with atomic_writer(path) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Sync ``folder``, so that renames in it survive a power cut."""
    _sync(folder)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path``; synced and renamed to it when the block ends well, removed otherwise.

    ``path`` must not exist, or be an empty folder.

    Raises:
        StateError: the disk is full or not writable, or ``path`` holds something.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for one in sorted(temporary.rglob("*")):
            if one.is_file():
                _sync(one)
        sync_folder(temporary)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

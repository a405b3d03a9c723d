"""Atomic writes: a file, or a folder, is written under a temporary name, synced, and renamed.

A command that works for long checks with ``check_outputs`` at its start whether its files can be written at the end.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from tplr.errors import ConfigError, StateError


@contextlib.contextmanager
def atomic_writer(path: Path, *, create_only: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path``; rename it to ``path`` if the block succeeds, else remove it.

    A reader sees the old file or the new one, never a part, even if this process is killed. Of several concurrent
    writers the last wins, or with ``create_only`` the first.

    Raises:
        FileExistsError: ``create_only``, and ``path`` exists.
        StateError: the disk is full or not writable; ``path`` is unchanged.
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
        # After the rename there is nothing to remove. On a full disk the removal may fail, which is harmless.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_error(path: Path, error: OSError) -> StateError:
    """Return the error for ``path``, which could not be written."""
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
    """Yield a temporary folder beside ``path``; sync and rename it to ``path`` if the block succeeds, else remove it.

    ``path`` must not exist, or must be an empty folder.

    Raises:
        StateError: the disk is full or not writable, or ``path`` is not empty.
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


def check_outputs(files: Mapping[str, Path | None]) -> None:
    """Raise ConfigError with a line for each file that can't be written; missing folders will be created, and are fine.

    Args:
        files: by command-line option, or by another name for the error; None: not wanted.
    """
    found = [(name, path, _obstacle(path)) for name, path in files.items() if path is not None]
    if lines := [f"{name} {path}: {obstacle}; give another path" for name, path, obstacle in found if obstacle]:
        raise ConfigError("\n".join(lines))


def _obstacle(path: Path) -> str | None:
    """Return why a file can't be written; None if it can."""
    if path.is_dir():
        return "is a folder"
    folder = next(one for one in path.absolute().parents if one.exists())
    if not folder.is_dir():
        return f"{folder} is a file"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"

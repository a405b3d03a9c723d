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
from typing import BinaryIO, Literal

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
def atomic_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a hidden folder beside ``path``; sync and rename it to ``path`` if the block succeeds, else remove it.

    A new ``path`` is complete or absent, also after a power cut.

    Args:
        replace: remove the folder at ``path`` just before the renaming. Otherwise ``path`` must not exist, or must be
            an empty folder.

    Raises:
        StateError: the disk is full or not writable, or ``path`` is not empty.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for one in (temporary, *temporary.rglob("*")):
            if one.is_file() or one.is_dir():
                _sync(one)
        if replace and path.exists():
            shutil.rmtree(path)
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


Output = Literal["file", "appended file", "folder"]


def check_outputs(paths: Mapping[str, Path | None], what: Output = "file") -> None:
    """Raise ConfigError with a line for each path that can't be written; missing folders will be created, and are fine.

    Args:
        paths: by command-line option, or by another name for the error; None: not wanted.
        what: a file is replaced, and a folder created beside the path, so they need a folder that can be written; an
            existing file that is appended to must be writable itself.
    """
    found = [(name, path, _obstacle(path, what)) for name, path in paths.items() if path is not None]
    if lines := [f"{name} {path}: {obstacle}; give another path" for name, path, obstacle in found if obstacle]:
        raise ConfigError("\n".join(lines))


def _obstacle(path: Path, what: Output) -> str | None:
    """Return why a path can't be written; None if it can."""
    try:
        if what != "folder" and path.is_dir():
            return "is a folder"
        if what == "appended file" and path.exists():
            return None if os.access(path, os.W_OK) else "is not writable"
        folder = next(one for one in path.absolute().parents if one.exists())
    except OSError as error:
        return error.strerror or str(error)
    if not folder.is_dir():
        return f"{folder} is a file"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"

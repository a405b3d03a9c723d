"""Reads and writes a ``.env`` file that node, systemd and Docker read in the same way; only its owner can read it."""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from dotenv import dotenv_values

from tplr.errors import ConfigError
from tplr.files import atomic_writer, write_error

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@%+=~?&*-]*")
# Characters that the three readers treat differently, even between single quotes.
_AMBIGUOUS = re.compile(r"['\\\n\r\0]|\$\{")


def read_env_file(path: Path) -> dict[str, str]:
    """Read the variables of a file; {} if there is none. Raises ConfigError if it is not readable text."""
    try:
        return {name: value for name, value in dotenv_values(path).items() if value is not None}
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{path}: expected a file in UTF-8 that the account of the node can read, got {type(error).__name__}"
        ) from None


def write_env_file(path: Path, variables: Mapping[str, str], *, comment: str) -> None:
    """Write ``variables`` with mode 600, atomically; an existing file with other content is kept as ``PATH.old``.

    A link is kept as a link: root may write here, in a folder whose owner may not read what the link points to.

    Raises:
        ConfigError: a name or a value can't be written so that every reader reads the same value.
        StateError: the folder can't be written; the file is unchanged.
    """
    lines = [f"# {comment}", *(f"{name}={_value(name, value)}" for name, value in variables.items())]
    body = ("\n".join(lines) + "\n").encode()
    kept = path.with_name(f"{path.name}.old")
    try:
        if path.is_symlink():
            path.replace(kept)
        old = _read(path)
    except OSError as error:
        raise write_error(path, error) from error
    if old is not None and old != body:
        _write(kept, old)
    _write(path, body)


def make_private(path: Path) -> None:
    """Set the mode of a file to 600, unless it is a link, which may lead to somebody else's file."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)


def _read(path: Path) -> bytes | None:
    """Read a file that is not a link; None if there is none. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _write(path: Path, body: bytes) -> None:
    with atomic_writer(path) as file:
        os.fchmod(file.fileno(), 0o600)  # before the file has any content
        file.write(body)


def _value(name: str, value: str) -> str:
    if not _NAME.fullmatch(name) or _AMBIGUOUS.search(value):
        raise ConfigError(f"{name}: its value has a quote, a backslash, a line break or ${{: use another key")
    return value if _PLAIN.fullmatch(value) else f"'{value}'"

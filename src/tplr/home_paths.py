"""Home folders in paths that a user gives: ``~`` and ``~USER``."""

import argparse
from pathlib import Path

from tplr.errors import ConfigError


def expanded(path: Path, name: str = "") -> Path:
    """Return ``path`` with the home folder for ``~`` or ``~USER``.

    Raises:
        ConfigError: the user or the home folder is unknown; the text names the setting ``name``.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        label = f"{name} is " if name else ""
        raise ConfigError(f"{label}{path}: no home folder is known for {path.parts[0]}: give the whole path") from None


def home_path(text: str) -> Path:
    """Accept a path on the command line, for ``type`` of ``argparse``."""
    try:
        return expanded(Path(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error

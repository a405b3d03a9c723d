"""A JSON file that is read again when it changes."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from tplr.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")


class WatchedJson(Generic[T]):
    """The parsed content of a file.

    Args:
        parse: raises ConfigError for content that can't be used.

    Raises:
        ConfigError: the file can't be read or used. Later failures are logged, and the last valid content stays.
    """

    def __init__(self, path: Path, parse: Callable[[Any], T]) -> None:
        self._path = path
        self._parse = parse
        self._stamp = _stamp(path)
        self.content = self._load()

    def changed(self) -> bool:
        """Whether ``content`` is new since the last call."""
        # One stat call per look takes microseconds, so it stays on the event loop.
        if (stamp := _stamp(self._path)) == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.content = self._load()
        except ConfigError as error:
            log.warning("%s: not loaded, its last valid content stays: %s", self._path, error)
            return False
        return True

    def _load(self) -> T:
        try:
            return self._parse(json.loads(self._path.read_bytes()))
        except OSError as error:
            raise ConfigError(f"{self._path}: can't be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{self._path}: is not JSON: {error}") from error


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a stamp that changes when the file does: a replaced file has another inode even within one clock tick."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino

"""Detects the format of a store, and lists its files in an order that does not depend on the file system."""

import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, Literal

from tplr.errors import ConfigError
from tplr.storage.folder_walk import walk

StoreFormat = Literal["h5", "bin", "jsonl"]

META = "meta.json"
# Of an unfinished preparation, and of a finished one.
JOURNAL = ".prepare-journal.json"
REPORT = "prepare.json"
_SUFFIXES: dict[str, StoreFormat] = {".h5": "h5", ".hdf5": "h5", ".jsonl": "jsonl"}


def import_h5py() -> Any:
    """The module ``h5py``. Raises ConfigError, which names the extra, if it is not installed."""
    try:
        return import_module("h5py")
    except ImportError as error:
        raise ConfigError("token stores in the format h5 need the extra: .venv/bin/pip install -e '.[h5]'") from error


def detect_format(path: str | Path) -> StoreFormat:
    """Return ``h5``, ``bin`` or ``jsonl``. A folder is searched recursively: for HDF5 files first, then for ``.bin``
    files beside a ``meta.json``, then for JSON lines.

    Raises:
        FileNotFoundError: no such path, or a folder without any of these.
        ValueError: a file of another kind.
    """
    path = Path(path)
    if path.is_dir():
        return format_of_files((found.relative_to(path) for found in files_of(path, "")), path)
    if not path.exists():
        raise FileNotFoundError(f"no file or folder {path}")
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"Unsupported file format {path.suffix!r} of {path}: expected .h5, .hdf5, .jsonl or a folder")
    return _SUFFIXES[path.suffix]


def format_of_files(files: Iterable[PurePath], where: object) -> StoreFormat:
    """The format of a folder ``where`` with these files. Raises FileNotFoundError as ``detect_format``."""
    names, suffixes = set[str](), set[str]()
    for file in files:
        names.add(file.name)
        suffixes.add(file.suffix)
    if suffixes & {".h5", ".hdf5"}:
        return "h5"
    if ".bin" in suffixes and META in names:
        return "bin"
    if ".jsonl" in suffixes:
        return "jsonl"
    raise FileNotFoundError(f"No supported data files in {where}: expected .h5, .jsonl, or .bin with {META}")


def files_of(path: Path, *suffixes: str) -> list[Path]:
    """Return ``path`` itself, or the files below it with these suffixes in natural order, without hidden files."""
    if path.is_file():
        return [path]
    found = (folder / name for folder, names in walk(path, hidden=False) for name in names if name.endswith(suffixes))
    return sorted((file for file in found if not file.name.startswith(".") and file.is_file()), key=natural)


def metas_of(path: Path) -> list[Path]:
    """Return the ``meta.json`` files at ``path`` like ``files_of``."""
    return [file for file in files_of(path, META) if file.name == META]


def natural(path: PurePath | str) -> list[list[tuple[int, int, str]]]:
    """Sort key that compares numbers by value: ``shard_9999`` before ``shard_10000``, ``data_2`` before ``data_10``."""
    parts = PurePath(path).parts
    return [
        [
            (0, int(piece), piece) if piece.isdecimal() else (1, 0, piece)
            for piece in re.split(r"([0-9]+)", part)
            if piece
        ]
        for part in parts
    ]

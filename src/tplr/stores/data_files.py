"""The data files of a store in HDF5 or JSON Lines: those that the ``meta.json`` of their folder lists."""

from pathlib import Path

from tplr.errors import DataError
from tplr.stores.detect import META, files_of, metas_of
from tplr.stores.meta import read_meta


def data_files(path: Path, *suffixes: str) -> list[Path]:
    """Return ``path`` itself, or the files below it with these suffixes in natural order.

    A folder whose ``meta.json`` is not of the rich form, or that has none, may hold any files.

    Raises:
        DataError: a rich ``meta.json`` does not list a file of its folder, or its folder lacks one that it lists.
    """
    found = files_of(path, *suffixes)
    metas = metas_of(path) if path.is_dir() else [path.with_name(META)] if path.with_name(META).exists() else []
    for meta in metas:
        if (shard := read_meta(meta.parent).shard) is None:
            continue
        listed = {meta.with_name(file.path) for file in shard.files if file.path.endswith(suffixes)}
        present = {file for file in found if file.parent == meta.parent}
        if stray := sorted(present - listed):
            raise DataError(f"{stray[0]} is not listed in {META} beside it: move it elsewhere, or delete it")
        if path.is_dir() and (missing := sorted(listed - present)):
            raise DataError(f"{missing[0]} is missing, and its {META} lists it: fetch or prepare the store again")
    return found

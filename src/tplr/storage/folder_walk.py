"""Lists a folder and all folders below it, also through symbolic links."""

import os
from collections.abc import Iterator
from pathlib import Path


def walk(top: Path, *, hidden: bool) -> Iterator[tuple[Path, list[str]]]:
    """Yield ``top`` and all folders below it, each once, with the names of their files.

    Links are followed last, so that a second link to a folder adds nothing, and one to a folder above ends nowhere.

    Args:
        hidden: whether to enter folders whose names begin with a dot.
    """
    seen = {_identity(folder) for folder in top.resolve().parents}
    starts = [top]
    for start in starts:  # grows by the links that are found
        for path, subfolders, files in os.walk(start):
            folder = Path(path)
            if (identity := _identity(folder)) in seen:
                subfolders.clear()
                continue
            seen.add(identity)
            subfolders[:] = sorted(one for one in subfolders if hidden or not one.startswith("."))
            starts += [folder / one for one in subfolders if (folder / one).is_symlink()]
            yield folder, files


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino

"""Compares a preparation's shards with the record of them in its journal or report."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tplr.errors import DataError
from tplr.stores.detect import META
from tplr.stores.meta import parse_meta


def check_shards(folder: Path, shards: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the ``meta.json`` and the sizes of the files of all ``shards``, given by path in ``folder``.

    Raises:
        DataError: names a shard that is missing or differs.
    """
    for path, shard in shards.items():
        if problem := _problem(folder / path, shard["meta_sha256"]):
            raise DataError(f"{folder} is not whole: {path}{problem}; remove the folder and prepare it again")


def _problem(folder: Path, meta_sha256: str) -> str | None:
    try:
        data = (folder / META).read_bytes()
        if hashlib.sha256(data).hexdigest() != meta_sha256:
            return f"/{META} is of another preparation, or damaged"
        shard = parse_meta(data, str(folder / META)).shard
        sizes = {file.path: (folder / file.path).stat().st_size for file in shard.files} if shard else {}
        if shard and (wrong := [file.path for file in shard.files if sizes[file.path] != file.bytes]):
            return f"/{wrong[0]} has {sizes[wrong[0]]} bytes, and {META} gives another number"
    except FileNotFoundError as error:
        return f"/{Path(error.filename).name} is missing"
    return None

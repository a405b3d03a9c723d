"""Compares a preparation's shards with the record of them in its journal or report."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tplr.errors import DataError
from tplr.stores.detect import JOURNAL, META, REPORT, metas_of
from tplr.stores.meta import parse_meta

Shards = Mapping[str, Mapping[str, Any]]

LEVELS = 3  # a path in a preparation: a domain, a shard or a file


def check_prepared(path: Path) -> None:
    """Check ``path`` if it is the output of a preparation or a part of one; other paths pass.

    Raises:
        DataError: the preparation is not finished, lacks a shard, or has a shard that its report does not name.
    """
    path = path.resolve()
    root = prepared_root(path)
    if root is None:
        return
    if not (root / REPORT).is_file():
        raise DataError(
            f"{root} is not finished: repeat the tplr data prepare command that began it, which resumes it; "
            "or open what is there with allow_incomplete=True"
        )
    _check_part(root, path)


def prepared_root(path: Path) -> Path | None:
    """Return the folder of the preparation, finished or not, that contains ``path``; None if there is none."""
    roots = (path, *path.parents[:LEVELS])
    return next((root for root in roots if (root / REPORT).is_file() or (root / JOURNAL).is_file()), None)


def _check_part(root: Path, path: Path) -> None:
    try:
        shards = reported_shards((root / REPORT).read_bytes())
    except DataError as error:
        if root == path:
            raise DataError(f"{root}: {error}") from error
        return  # a file above a store may be unrelated
    part = path.relative_to(root)
    reported = {name: shards[name] for name in shards if Path(name).is_relative_to(part)}
    check_shards(root, reported)
    found = [str(meta.parent.relative_to(root)) for meta in metas_of(path)]
    if unnamed := [name for name in found if name not in shards]:
        raise DataError(f"{root}: {unnamed[0]} is not a shard of its {REPORT}; move it elsewhere")
    if unread := [name for name in reported if name not in found]:
        raise DataError(
            f"{root}: {unread[0]} would not be read, because it is hidden or a second link to a folder: copy it here"
        )


def reported_shards(report: bytes) -> Shards:
    """Return the shards that a finished preparation wrote, by path. Raises DataError if this is not such a report."""
    try:
        shards = json.loads(report)["progress"]["shards"]
        return {path: {"meta_sha256": shard["meta_sha256"]} for path, shard in shards.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{REPORT} is not a report of a preparation: {error!r}") from error


def check_shards(folder: Path, shards: Shards) -> None:
    """Compare the ``meta.json`` and the sizes of the files of all ``shards``, given by path in ``folder``.

    Raises:
        DataError: names a shard that is missing or differs.
    """
    for path, shard in shards.items():
        if problem := _problem(folder / path, shard["meta_sha256"]):
            raise DataError(f"{folder} is incomplete: {path}{problem}; remove the folder and prepare it again")


def _problem(folder: Path, meta_sha256: str) -> str | None:
    try:
        data = (folder / META).read_bytes()
        if hashlib.sha256(data).hexdigest() != meta_sha256:
            return f"/{META} belongs to another preparation, or is damaged"
        shard = parse_meta(data, str(folder / META)).shard
        sizes = {file.path: (folder / file.path).stat().st_size for file in shard.files} if shard else {}
        if shard and (wrong := [file.path for file in shard.files if sizes[file.path] != file.bytes]):
            return f"/{wrong[0]} has {sizes[wrong[0]]} bytes, which differs from {META}"
    except FileNotFoundError as error:
        return f"/{Path(error.filename).name} is missing"
    return None

"""Reads from the manifests of a folder or bucket prefix which files it should hold, with sizes and hashes.

There are two kinds: a dataset of pages (``_metadata.yaml`` and ``_shard_sizes.json``, see ``pages/manifest.py``) and a
token store (a ``meta.json`` in the folder of each shard, see ``stores/meta.py``; ``prepare.json``, which
``tplr data prepare`` writes at the top, names the shards: also those of a domain or of one shard below it).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from tplr.errors import AccessDenied, DataError, ObjectNotFound
from tplr.pages.fetch_manifest import MAX_MANIFEST_BYTES
from tplr.pages.manifest import METADATA, SHARD_SIZES, DatasetConfig, DatasetManifest, parse_manifest
from tplr.schemas import ObjectInfo
from tplr.storage import ObjectStore, PlainFolder
from tplr.stores.detect import JOURNAL, META, REPORT
from tplr.stores.meta import parse_meta
from tplr.stores.prepared import LEVELS, prepared_root, reported_shards


@dataclass(frozen=True)
class ExpectedFile:
    """A file that a manifest names; ``size`` (bytes) and ``sha256`` (hex) are None if the manifest lacks them."""

    path: str
    size: int | None
    sha256: str | None

    def mismatch(self, there: Mapping[str, ObjectInfo]) -> str | None:
        """Return how this file differs from the listing ``there``; None if it does not."""
        if self.path not in there:
            return f"{self.path}: is missing"
        if self.size is not None and there[self.path].size != self.size:
            return f"{self.path}: has {there[self.path].size} bytes, the manifest says {self.size}"
        return None


@dataclass(frozen=True)
class ExpectedFiles:
    """The files that the manifests name.

    Attributes:
        manifests: paths of the manifests; the last one makes the rest valid, so it is written last.
        files: the files that they name; some may be manifests.
        dataset: the manifest of a dataset of pages; None for a token store.
    """

    manifests: tuple[str, ...]
    files: tuple[ExpectedFile, ...]
    dataset: DatasetManifest | None = None

    @property
    def configs(self) -> tuple[DatasetConfig, ...]:
        """The configs of a dataset of pages; none for a token store."""
        return tuple(self.dataset.configs.values()) if self.dataset else ()


def local_prefix(folder: Path) -> tuple[ObjectStore, str]:
    """Return a folder as a store and a prefix in it, like a bucket. For a folder in a preparation, the store's root is
    the preparation's folder."""
    folder = folder.resolve()
    top = prepared_root(folder) or folder
    return PlainFolder(top.parent), folder.relative_to(top.parent).as_posix()


async def list_prefix(store: ObjectStore, prefix: str) -> dict[str, ObjectInfo]:
    """List all objects below ``prefix``, by path relative to it. Raises StoreError."""
    return {info.key.removeprefix(f"{prefix}/"): info for info in await store.list(f"{prefix}/")}


async def expected_files(store: ObjectStore, prefix: str, there: Mapping[str, ObjectInfo]) -> ExpectedFiles:
    """Read the manifests that the listing ``there`` contains.

    Raises:
        DataError: there is no manifest, or one is malformed or names no files.
        StoreError: a manifest can't be read.
    """

    async def read(path: str) -> bytes:
        return await store.get(f"{prefix}/{path}", max_bytes=MAX_MANIFEST_BYTES, if_match=there[path].etag)

    if METADATA in there or SHARD_SIZES in there:
        for name in (METADATA, SHARD_SIZES):
            if name not in there:
                raise DataError(f"{name} is missing: the dataset is incomplete")
        return _dataset(parse_manifest(await read(METADATA), await read(SHARD_SIZES), prefix))
    metas = [path for path in manifest_paths(there) if path != REPORT]
    if JOURNAL in there:
        raise DataError(_unfinished(JOURNAL))
    if not metas:
        raise DataError(
            f"neither {METADATA} and {SHARD_SIZES} nor a {META}: there is no dataset and no token store here"
        )
    files = [file for meta in metas for file in _store_files(meta, await read(meta))]
    if REPORT in there:
        reported, manifests = _reported(await read(REPORT)), (REPORT, *metas)
    else:
        reported, manifests = await _reported_above(store, prefix), tuple(metas)
    if reported is None:
        return ExpectedFiles(manifests, tuple(files))
    if unnamed := sorted({*metas} - {file.path for file in reported}):
        raise DataError(f"{unnamed[0]} belongs to no shard of {REPORT}: delete it, or move it elsewhere")
    return ExpectedFiles(manifests, (*files, *reported))


def manifest_paths(there: Collection[str]) -> tuple[str, ...]:
    """Return the manifests of either kind among some paths, except those in hidden folders, which no reader opens.

    If they are deleted in this order, readers refuse the remaining files.
    """
    metas = sorted(path for path in there if path.rpartition("/")[2] == META and not f"/{path}".count("/."))
    pages, report = ([path for path in paths if path in there] for paths in ((SHARD_SIZES, METADATA), (REPORT,)))
    return (*pages, *metas, *report)


def _dataset(manifest: DatasetManifest) -> ExpectedFiles:
    shards = [shard for config in manifest.configs.values() for shard in config.shards]
    files = {shard.path: ExpectedFile(shard.path, shard.byte_size, shard.sha256) for shard in shards}
    return ExpectedFiles((METADATA, SHARD_SIZES), tuple(files[path] for path in sorted(files)), manifest)


def _store_files(path: str, data: bytes) -> list[ExpectedFile]:
    shard = parse_meta(data, path).shard
    if shard is None:
        raise DataError(f"{path} has no hashes: this is the bare form; prepare the store again")
    folder = path.removesuffix(META)
    return [ExpectedFile(folder + file.path, file.bytes, file.sha256) for file in shard.files]


def _reported(data: bytes) -> list[ExpectedFile]:
    """Return the ``meta.json`` of each shard that a finished preparation wrote."""
    return [ExpectedFile(f"{path}/{META}", None, shard["meta_sha256"]) for path, shard in reported_shards(data).items()]


async def _reported_above(store: ObjectStore, prefix: str) -> list[ExpectedFile] | None:
    """Return the files below ``prefix`` in the report of the preparation around it; None without a readable report.

    Raises:
        DataError: that preparation is not finished.
    """
    for root in list(PurePosixPath(prefix).parents)[:LEVELS]:
        if report := await _read_if_there(store, str(root / REPORT)):
            try:
                files = _reported(report)
            except DataError:
                return None  # a file above a store may be unrelated
            part = PurePosixPath(prefix).relative_to(root)
            inside = [(PurePosixPath(file.path), file) for file in files]
            return [
                replace(file, path=str(path.relative_to(part))) for path, file in inside if path.is_relative_to(part)
            ]
        if await _read_if_there(store, str(root / JOURNAL)):
            raise DataError(_unfinished(str(root / JOURNAL)))
    return None


async def _read_if_there(store: ObjectStore, key: str) -> bytes | None:
    """Read an object; return None if it is missing, or if the credentials cover only the prefix below."""
    try:
        return await store.get(key, max_bytes=MAX_MANIFEST_BYTES)
    except (ObjectNotFound, AccessDenied):
        return None


def _unfinished(journal: str) -> str:
    return f"{journal}: this preparation is not finished; repeat tplr data prepare, which resumes it"

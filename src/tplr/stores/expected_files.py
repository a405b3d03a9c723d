"""What a folder or a prefix in a bucket should hold, as the manifests in it say: files, their sizes and hashes.

Two kinds are known: a dataset of pages (``_metadata.yaml`` and ``_shard_sizes.json``, see ``shards.py``) and a token
store (a ``meta.json`` beside the files of each of its shards, see ``store/meta.py``; ``prepare.json`` above, if
``tplr data prepare`` wrote it, names the shards).
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tplr.errors import DataError
from tplr.pages.fetch_manifest import MAX_MANIFEST_BYTES
from tplr.pages.manifest import METADATA, SHARD_SIZES, DatasetManifest, parse_manifest
from tplr.schemas import ObjectInfo
from tplr.storage import ObjectStore, PlainFolder
from tplr.stores.detect import JOURNAL, META, REPORT
from tplr.stores.meta import parse_meta


@dataclass(frozen=True)
class ExpectedFile:
    """A file that a manifest names; ``size`` (bytes) and ``sha256`` (hex) are None where it does not say."""

    path: str
    size: int | None
    sha256: str | None

    def mismatch(self, there: Mapping[str, ObjectInfo]) -> str | None:
        """What is wrong with this file in a place that holds ``there``, as far as a listing tells."""
        if self.path not in there:
            return f"{self.path}: is missing"
        if self.size is not None and there[self.path].size != self.size:
            return f"{self.path}: has {there[self.path].size} bytes, the manifest says {self.size}"
        return None


@dataclass(frozen=True)
class ExpectedFiles:
    """What should be there.

    Attributes:
        manifests: paths of the manifests themselves; the last one is what makes the rest valid, so it is written last.
        files: what they name, which may be some of themselves.
        dataset: the manifest of a dataset of pages; None for a token store.
    """

    manifests: tuple[str, ...]
    files: tuple[ExpectedFile, ...]
    dataset: DatasetManifest | None = None


def local_prefix(folder: Path) -> tuple[ObjectStore, str]:
    """A folder as a store and a prefix in it, as a bucket would be."""
    folder = folder.resolve()
    return PlainFolder(folder.parent), folder.name


async def list_prefix(store: ObjectStore, prefix: str) -> dict[str, ObjectInfo]:
    """Everything below ``prefix``, by path from there on. Raises StoreError."""
    return {info.key.removeprefix(f"{prefix}/"): info for info in await store.list(f"{prefix}/")}


async def expected_files(store: ObjectStore, prefix: str, there: Mapping[str, ObjectInfo]) -> ExpectedFiles:
    """The manifests among what is ``there``, read.

    Raises:
        DataError: there is none, or one is not well-formed or names no files.
        StoreError: one can't be read.
    """

    async def read(path: str) -> bytes:
        return await store.get(f"{prefix}/{path}", max_bytes=MAX_MANIFEST_BYTES, if_match=there[path].etag)

    if METADATA in there or SHARD_SIZES in there:
        for name in (METADATA, SHARD_SIZES):
            if name not in there:
                raise DataError(f"{name} is missing: the dataset is not whole")
        return _dataset(parse_manifest(await read(METADATA), await read(SHARD_SIZES), prefix))
    metas = [path for path in manifest_paths(there) if path != REPORT]
    if JOURNAL in there:
        raise DataError(f"{JOURNAL}: this preparation is not finished; repeat tplr data prepare, which goes on with it")
    if not metas:
        raise DataError(
            f"neither {METADATA} and {SHARD_SIZES} nor a {META}: there is no dataset and no token store here"
        )
    files = [file for meta in metas for file in _store_files(meta, await read(meta))]
    if REPORT not in there:
        return ExpectedFiles(tuple(metas), tuple(files))
    return ExpectedFiles((*metas, REPORT), (*files, *_reported(await read(REPORT))))


def manifest_paths(there: Collection[str]) -> tuple[str, ...]:
    """The manifests of either kind among some paths; those that make the others whole come first."""
    metas = sorted(path for path in there if path.rpartition("/")[2] == META)
    return (*(path for path in (SHARD_SIZES, METADATA, REPORT) if path in there), *metas)


def _dataset(manifest: DatasetManifest) -> ExpectedFiles:
    shards = [shard for config in manifest.configs.values() for shard in config.shards]
    files = {shard.path: ExpectedFile(shard.path, shard.byte_size, shard.sha256) for shard in shards}
    return ExpectedFiles((METADATA, SHARD_SIZES), tuple(files[path] for path in sorted(files)), manifest)


def _store_files(path: str, data: bytes) -> list[ExpectedFile]:
    shard = parse_meta(data, path).shard
    if shard is None:
        raise DataError(f"{path} names no files with hashes: write the store anew, this is the bare form of others")
    folder = path.removesuffix(META)
    return [ExpectedFile(folder + file.path, file.bytes, file.sha256) for file in shard.files]


def _reported(data: bytes) -> list[ExpectedFile]:
    """The ``meta.json`` of each shard that a finished preparation wrote."""
    try:
        shards = json.loads(data)["progress"]["shards"]
        return [ExpectedFile(f"{path}/{META}", None, shard["meta_sha256"]) for path, shard in shards.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{REPORT} is no report of a preparation: {error!r}") from error

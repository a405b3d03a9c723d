"""Fetches a dataset's manifest: both of its objects in one version, or the kept copy if that is still the one."""

import asyncio

from tplr.errors import PreconditionFailed, StoreUnavailable
from tplr.pages.manifest import METADATA, SHARD_SIZES, DatasetManifest, parse_manifest
from tplr.pages.manifest_cache import ManifestCache, ManifestCopy
from tplr.storage.base import ObjectStore
from tplr.storage.replicas import Replicas

MAX_MANIFEST_BYTES = 64 * 2**20


async def fetch_manifest(replicas: Replicas, subfolder: str, cache: ManifestCache | None = None) -> DatasetManifest:
    """The dataset's manifest as one of the replicas has it now.

    Args:
        cache: asked before the objects are fetched, and given what was; their ETags are asked for in any case.

    Raises:
        DataError: it is not well-formed.
        StoreError: it can't be had.
    """

    async def ask(store: ObjectStore) -> ManifestCopy:
        etags = await _etags(store, subfolder)
        if cache is None:
            return await _fetch(store, subfolder, etags)
        kept = await asyncio.to_thread(cache.read)
        if kept is not None and kept.etags == etags:
            return kept
        async with cache.lock():  # one process fetches, the others find what it brought
            kept = await asyncio.to_thread(cache.read)
            if kept is None or kept.etags != etags:
                kept = await _fetch(store, subfolder, etags)
                await asyncio.to_thread(cache.write, kept)
        return kept

    copy = await replicas.ask(ask)
    return await asyncio.to_thread(parse_manifest, copy.metadata, copy.shard_sizes, subfolder)


async def _etags(store: ObjectStore, subfolder: str) -> tuple[str, str]:
    metadata = await store.head(f"{subfolder}/{METADATA}")
    return metadata.etag, (await store.head(f"{subfolder}/{SHARD_SIZES}")).etag


async def _fetch(store: ObjectStore, subfolder: str, etags: tuple[str, str]) -> ManifestCopy:
    """Both objects, of these ETags: never one of an old version and one of a new."""
    objects = []
    for name, etag in zip((METADATA, SHARD_SIZES), etags, strict=True):
        key = f"{subfolder}/{name}"
        try:
            objects.append(await store.get(key, max_bytes=MAX_MANIFEST_BYTES, if_match=etag))
        except PreconditionFailed as error:  # the next attempt asks for the new one
            raise StoreUnavailable("replaced while it was read", bucket=store.name, key=key) from error
    return ManifestCopy(etags, *objects)

"""Fetches a dataset's manifest: both objects of the same version, or the cached copy if the ETags still match."""

import asyncio
from functools import partial

from tplr.errors import PreconditionFailed, StoreUnavailable
from tplr.pages.manifest import METADATA, SHARD_SIZES, DatasetManifest, parse_manifest
from tplr.pages.manifest_cache import ManifestCache, ManifestCopy
from tplr.storage.base import ObjectStore
from tplr.storage.replicas import Replicas

MAX_MANIFEST_BYTES = 64 * 2**20


async def fetch_manifest(replicas: Replicas, subfolder: str, cache: ManifestCache | None = None) -> DatasetManifest:
    """Fetch the dataset's current manifest from one of the replicas.

    Args:
        cache: caches the objects. Their ETags are always requested.

    Raises:
        DataError: it is not well-formed.
        StoreError: it can't be fetched.
    """
    copy = await replicas.ask(partial(_copy, subfolder=subfolder, cache=cache))
    return await asyncio.to_thread(parse_manifest, copy.metadata, copy.shard_sizes, subfolder)


async def _copy(store: ObjectStore, subfolder: str, cache: ManifestCache | None) -> ManifestCopy:
    etags = await _etags(store, subfolder)
    if cache is None:
        return await _fetch(store, subfolder, etags)
    cached = await asyncio.to_thread(cache.read)
    if cached is not None and cached.etags == etags:
        return cached
    async with cache.lock():  # one process fetches; the others then find its copy
        cached = await asyncio.to_thread(cache.read)
        if cached is None or cached.etags != etags:
            cached = await _fetch(store, subfolder, etags)
            await asyncio.to_thread(cache.write, cached)
    return cached


async def _etags(store: ObjectStore, subfolder: str) -> tuple[str, str]:
    metadata = await store.head(f"{subfolder}/{METADATA}")
    return metadata.etag, (await store.head(f"{subfolder}/{SHARD_SIZES}")).etag


async def _fetch(store: ObjectStore, subfolder: str, etags: tuple[str, str]) -> ManifestCopy:
    """Fetch both objects with these ETags, so that an old and a new object are never combined."""
    objects = []
    for name, etag in zip((METADATA, SHARD_SIZES), etags, strict=True):
        key = f"{subfolder}/{name}"
        try:
            objects.append(await store.get(key, max_bytes=MAX_MANIFEST_BYTES, if_match=etag))
        except PreconditionFailed as error:  # the next attempt requests the new ETags
            raise StoreUnavailable("replaced while it was read", bucket=store.name, key=key) from error
    return ManifestCopy(etags, *objects)

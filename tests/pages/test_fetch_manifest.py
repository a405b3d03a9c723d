"""Manifests are fetched whole, cached on disk per dataset, and refused if they differ from the written ones."""

import asyncio
import errno
import fcntl
import json
import os
from dataclasses import replace

import pytest
from forked_python import interpreter

from tplr.errors import ObjectNotFound
from tplr.pages import manifest_cache
from tplr.pages.fetch_manifest import fetch_manifest
from tplr.pages.manifest_cache import ManifestCache, ManifestCopy, dataset_place
from tplr.storage.replicas import Replicas

PLACE = ("sub/set", "https://somewhere/books")


async def put_manifest(store, *, rows: int = 120) -> None:
    sizes = {"a": {"total_rows": rows, "shards": [{"path": "a/0.parquet", "num_rows": rows}]}}
    await store.put("sub/set/_metadata.yaml", b"configs: [{config_name: a}]")
    await store.put("sub/set/_shard_sizes.json", json.dumps(sizes).encode())


@pytest.fixture
def cache(tmp_path):
    return ManifestCache(tmp_path / "cache", PLACE)


def cache_file(cache: ManifestCache):
    return cache._cache.path(cache._key)


async def fetch(served, cache):
    return await fetch_manifest(Replicas([served.store]), "sub/set", cache)


async def test_what_has_not_changed_is_not_fetched_again(served, cache):
    await put_manifest(served.store)
    first = await fetch(served, cache)
    assert len(served.seen("GET")) == 2
    assert await fetch(served, cache) == first
    assert await fetch(served, ManifestCache(cache._lock.parents[1], PLACE)) == first
    assert len(served.seen("GET")) == 2
    assert await fetch(served, None) == first  # without a cache
    assert len(served.seen("GET")) == 4


async def test_a_changed_object_is_fetched_anew(served, cache):
    await put_manifest(served.store)
    first = await fetch(served, cache)
    await put_manifest(served.store, rows=121)
    second = await fetch(served, cache)
    assert (first.configs["a"].num_rows, second.configs["a"].num_rows) == (120, 121)
    assert first.sha256 != second.sha256
    await served.store.delete("sub/set/_shard_sizes.json")
    with pytest.raises(ObjectNotFound):  # a deleted dataset is reported as missing
        await fetch(served, cache)


async def test_two_datasets_in_one_folder_never_meet(served, cache, tmp_path):
    await put_manifest(served.store)
    await fetch(served, cache)
    bucket = served.bucket
    others = [
        dataset_place([bucket], "sub/set", "http://elsewhere"),
        dataset_place([bucket], "sub/set"),
        dataset_place([bucket], "sub/other"),
        dataset_place([replace(bucket, name="films")], "sub/set"),
        dataset_place([replace(bucket, account_id="d" * 32)], "sub/set"),
        dataset_place([replace(bucket, jurisdiction="eu")], "sub/set"),
        dataset_place([bucket, replace(bucket, name="films")], "sub/set"),
    ]
    assert len({PLACE, *others}) == 8
    caches = [ManifestCache(tmp_path / "cache", place) for place in others]
    assert len({cache_file(cache) for cache in caches}) == 7
    assert all(cache.read() is None for cache in caches)
    cache_file(caches[0]).parent.mkdir(exist_ok=True)
    cache_file(caches[0]).write_bytes(cache_file(cache).read_bytes())  # even under the other's name
    assert caches[0].read() is None


async def test_a_torn_or_damaged_copy_is_fetched_anew(served, cache, caplog):
    await put_manifest(served.store)
    first = await fetch(served, cache)
    whole = cache_file(cache).read_bytes()
    for cut in range(len(whole)):
        cache_file(cache).write_bytes(whole[:cut])
        assert cache.read() is None
    for at in range(0, len(whole), 7):
        cache_file(cache).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert cache.read() is None
    assert "damaged" in caplog.text
    assert await fetch(served, cache) == first
    assert cache_file(cache).read_bytes() == whole


async def test_both_objects_are_of_one_version(served, cache, monkeypatch):
    """Replaced between the request for the ETags and the fetch: the old and the new version are never mixed."""
    await put_manifest(served.store)
    head, heads = served.store.head, 0

    async def replaced_meanwhile(key):
        nonlocal heads
        heads += 1
        info = await head(key)
        if heads == 2:
            await served.store.put("sub/set/_metadata.yaml", b"configs: [{config_name: a}]\naddress: exact")
            await put_manifest(served.store, rows=130)
            await served.store.put("sub/set/_metadata.yaml", b"configs: [{config_name: a}]\naddress: exact")
        return info

    monkeypatch.setattr(served.store, "head", replaced_meanwhile)
    manifest = await fetch_manifest(Replicas([served.store], pause_seconds=0.01), "sub/set", cache)
    assert (manifest.address, manifest.configs["a"].num_rows) == ("exact", 130)
    assert cache.read() is not None


async def test_many_at_once_fetch_it_once(served, cache):
    await put_manifest(served.store)
    caches = [ManifestCache(cache._lock.parents[1], PLACE) for _ in range(8)]
    manifests = await asyncio.gather(*(fetch(served, one) for one in caches))
    assert len({manifest.sha256 for manifest in manifests}) == 1
    assert len(served.seen("GET")) == 2


PROCESS = """
import asyncio, sys
from pathlib import Path
from tplr.pages.fetch_manifest import fetch_manifest
from tplr.pages.manifest_cache import ManifestCache
from tplr.storage.replicas import Replicas
from tplr.schemas import Bucket
from tplr.storage import S3Connections

async def main(endpoint, folder):
    bucket = Bucket(name="books", account_id="a" * 32, access_key_id="b" * 32, secret_access_key="c" * 64)
    async with S3Connections(endpoint) as connections:
        replicas = Replicas([connections.store(bucket)])
        manifest = await fetch_manifest(replicas, "sub/set", ManifestCache(Path(folder), ("p",)))
    print(manifest.sha256)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_several_processes_share_it(served, tmp_path):
    await put_manifest(served.store)
    command = [*interpreter(), "-c", PROCESS, served.server.endpoint, str(tmp_path / "cache")]
    processes = [await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE) for _ in range(2)]
    told = [(await process.communicate())[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len({*told}) == 1
    assert len(served.seen("GET")) == 2
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in files) == [".bin", ".lock"]


async def test_a_process_that_keeps_the_lock_keeps_nobody_waiting_for_ever(served, cache, monkeypatch):
    await put_manifest(served.store)
    monkeypatch.setattr(manifest_cache, "LOCK_PATIENCE_SECONDS", 0.05)
    cache._lock.parent.mkdir(parents=True)
    with cache._lock.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert (await fetch(served, cache)).configs["a"].num_rows == 120


async def test_a_folder_that_can_not_be_one_costs_only_the_cache(served, tmp_path, caplog):
    await put_manifest(served.store)
    (tmp_path / "file").write_bytes(b"")
    for _ in range(2):
        assert (await fetch(served, ManifestCache(tmp_path / "file", PLACE))).configs["a"].num_rows == 120
    assert "not cached" in caplog.text


async def test_a_file_system_without_locks_costs_only_the_lock(served, cache, monkeypatch, caplog):
    await put_manifest(served.store)

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert (await fetch(served, cache)).configs["a"].num_rows == 120
    assert "no lock for the cached manifest" in caplog.text


def test_what_is_written_is_read(cache):
    copy = ManifestCopy(("1", "2"), b"meta\n\ndata", b"\n{}")
    cache.write(copy)
    assert cache.read() == copy

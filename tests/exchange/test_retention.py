"""Old objects are deleted; recent ones and those of other nodes, versions or kinds are kept."""

from pathlib import Path

import pytest

from tplr.exchange.retention import delete_old_checkpoints, delete_stale
from tplr.keys import commit_key, debug_key, gradient_key, peers_key, start_window_key, state_key
from tplr.storage import DirectoryStore, MemoryStore, ObjectStore


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path)


async def keys_of(store: ObjectStore) -> set[str]:
    return {info.key for info in await store.list()}


async def test_stale_objects_of_every_kind_go(store: ObjectStore) -> None:
    makers = (gradient_key, commit_key, debug_key)
    stale = {make(window, 7, "1") for make in makers for window in (0, 3, 9)}
    kept = {make(window, 7, "1") for make in makers for window in (10, 11, 100)}
    kept |= {gradient_key(3, 77, "1"), gradient_key(3, 7, "2"), commit_key(3, 7, "12")}
    kept |= {peers_key(3, "1"), start_window_key("1"), state_key("checkpoint", 3, 7, "1"), "gradient-x-7-v1", "mine"}
    for key in stale | kept:
        await store.put(key, b"x")
    assert await delete_stale(store, uid=7, before=10, version="1") == len(stale)
    assert await keys_of(store) == kept
    assert await delete_stale(store, uid=7, before=10, version="1") == 0


async def test_aggregates_go_whoever_made_them(store: ObjectStore) -> None:
    for window in (3, 12):
        await store.put(state_key("aggregator", window, 7, "1"), b"x")
    assert await delete_stale(store, uid=9, before=10, version="1", kinds=["aggregator"]) == 1
    assert await keys_of(store) == {"aggregator-12-v1.safetensors"}


async def test_newest_checkpoints_stay_with_all_their_parts(store: ObjectStore) -> None:
    def parts(window: int, uid: int) -> set[str]:
        return {f"checkpoint-{window}-{uid}-v1/{part}" for part in ("a.safetensors", "deep/b", "manifest.json")}

    others = parts(1, 8) | {gradient_key(1, 7, "1")}
    for key in others.union(*(parts(window, 7) for window in (2, 9, 10, 30))):
        await store.put(key, b"x")
    assert await delete_old_checkpoints(store, uid=7, keep_last=3, version="1") == 3
    assert await keys_of(store) == others | parts(9, 7) | parts(10, 7) | parts(30, 7)
    assert await delete_old_checkpoints(store, uid=7, keep_last=3, version="1") == 0
    assert await delete_old_checkpoints(store, uid=7, keep_last=0, version="1") == 9
    assert await keys_of(store) == others

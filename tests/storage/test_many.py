"""Many operations with bounded concurrency: in order, and the first error ends all."""

import asyncio

import pytest

from tplr.errors import AccessDenied, ObjectNotFound, StoreUnavailable
from tplr.storage import MemoryStore, delete_many
from tplr.storage.many import for_each


async def test_never_more_than_allowed_at_once_and_each_exactly_once() -> None:
    running, most, done = 0, 0, []

    async def work(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.003 - 0.001 * (item % 3))  # the later items of three finish first
        running -= 1
        done.append(item)
        return -item

    assert await for_each(range(20), work, concurrency=3) == [-item for item in range(20)]
    assert most == 3
    assert done != sorted(done)
    assert sorted(done) == list(range(20))


async def test_the_first_error_ends_the_others_and_comes_out_itself() -> None:
    cancelled, begun = [], []

    async def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ObjectNotFound("gone")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(ObjectNotFound, match="gone"):
        await for_each(range(100), work, concurrency=3)
    assert begun == [0, 1, 2]
    assert sorted(cancelled) == [0, 2]


class Stumbling(MemoryStore):
    """Unavailable at the first delete of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def delete(self, key: str) -> None:
        self.asked.append(key)
        if key == "forbidden":
            raise AccessDenied("no")
        if self.asked.count(key) == 1:
            raise StoreUnavailable("once")
        await super().delete(key)


async def test_every_key_goes_with_its_own_retries() -> None:
    store = Stumbling()
    for key in ("a", "b", "kept"):
        await store.put(key, b"x")
    await delete_many(store, ["a", "b", "missing"])
    assert [info.key for info in await store.list()] == ["kept"]


async def test_a_refusal_is_told() -> None:
    with pytest.raises(AccessDenied):
        await delete_many(Stumbling(), ["forbidden"])

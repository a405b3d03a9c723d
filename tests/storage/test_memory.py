"""The memory store uses the clock that a test gives."""

from tplr.storage import MemoryStore


async def test_last_modified_is_the_given_clock_cut_off() -> None:
    now = 1000.9
    store = MemoryStore(clock=lambda: now)
    assert (await store.put("k", b"x")).last_modified == 1000.0
    now = 1003.2
    assert (await store.head("k")).last_modified == 1000.0
    await store.put("k", b"y")
    assert (await store.head("k")).last_modified == 1003.0

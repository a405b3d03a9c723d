"""Training yields the model to waiting tasks, in the order of their requests."""

import asyncio

from tplr.node.model_lock import ModelLock


async def test_the_holder_sees_that_others_wait_and_they_come_in_order():
    lock, held = ModelLock(), []

    async def hold(name: str) -> None:
        async with lock:
            held.append(name)

    async with lock:
        assert not lock.wanted()
        others = [asyncio.create_task(hold(name)) for name in ("apply", "save")]
        await asyncio.sleep(0)
        assert lock.wanted()
    async with lock:
        held.append("training")
    await asyncio.gather(*others)
    assert held == ["apply", "save", "training"]
    assert not lock.wanted()


async def test_who_is_cancelled_waits_no_more():
    lock = ModelLock()
    async with lock:
        waiting = asyncio.create_task(lock.__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not lock.wanted()

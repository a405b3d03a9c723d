"""``OrderedSemaphore``: who waits, the order of grants, and no lost slots."""

import asyncio

from tplr.concurrency.ordered_semaphore import OrderedSemaphore


async def test_of_those_that_wait_the_first_announced_goes_first():
    slots = OrderedSemaphore(1)
    turns = [slots.turn() for _ in range(5)]
    done = []

    async def work(i: int) -> None:
        async with slots.slot(turns[i]):
            await asyncio.sleep(0)
            done.append(i)

    await asyncio.gather(*map(work, [4, 3, 0, 2, 1]))
    assert done == [4, 0, 1, 2, 3]


async def test_only_so_many_at_once_and_cancelled_ones_lose_no_slot():
    slots = OrderedSemaphore(2)
    running, most = 0, 0

    async def work() -> None:
        nonlocal running, most
        async with slots.slot(slots.turn()):
            running += 1
            most = max(most, running)
            try:
                await asyncio.sleep(0.001)
            finally:
                running -= 1

    tasks = [asyncio.create_task(work()) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    await asyncio.sleep(0.0015)  # those that have just been given a slot
    for task in tasks[1::3]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 2
    assert slots._free == 2

"""A client that keeps failing is replaced; nobody loses the one that they use."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from botocore.exceptions import ClientError

from tplr.errors import StoreUnavailable
from tplr.storage import s3_client
from tplr.storage.s3_client import FAILURES_IN_A_ROW, RefCountedClient
from tplr.testing.s3server import Reset

REFUSAL = ClientError({"Error": {"Code": "SlowDown"}}, "GetObject")


class Opened:
    """Counts clients by number: opened, closed."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed: list[int] = []

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[int]:
        self.opened += 1
        number = self.opened
        await asyncio.sleep(0)
        yield number
        self.closed.append(number)


async def fail(client: RefCountedClient, error: BaseException) -> None:
    with suppress(type(error)):
        async with client.lend():
            raise error


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "SECONDS_BETWEEN", 0.0)


async def test_one_client_for_all_calls_until_it_keeps_failing() -> None:
    opened = Opened()
    client = RefCountedClient(opened)
    for _ in range(FAILURES_IN_A_ROW - 1):
        await fail(client, ConnectionResetError())
    assert (opened.opened, opened.closed) == (1, [])
    await fail(client, ConnectionResetError())
    assert (opened.opened, opened.closed) == (1, [1])
    async with client.lend() as number:
        assert number == 2
    await client.close()
    assert opened.closed == [1, 2]


@pytest.mark.parametrize("error", [None, REFUSAL], ids=["answer", "refusal"])
async def test_an_answer_speaks_for_the_client(error: Exception | None) -> None:
    opened = Opened()
    client = RefCountedClient(opened)
    for _ in range(3):
        for _ in range(FAILURES_IN_A_ROW - 1):
            await fail(client, TimeoutError())
        if error:
            await fail(client, error)
        else:
            async with client.lend():
                pass
    assert (opened.opened, opened.closed) == (1, [])


async def test_who_still_uses_the_old_one_keeps_it() -> None:
    opened = Opened()
    client = RefCountedClient(opened)
    async with client.lend() as mine:
        for _ in range(FAILURES_IN_A_ROW):
            await fail(client, ConnectionResetError())
        assert opened.closed == []
        async with client.lend() as newer:
            assert (mine, newer) == (1, 2)
    assert opened.closed == [1]


async def test_calls_that_were_given_up_count_too() -> None:
    opened = Opened()
    client = RefCountedClient(opened)
    for _ in range(FAILURES_IN_A_ROW):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.001), client.lend():
                await asyncio.sleep(10)
    assert opened.closed == [1]


async def test_not_more_often_than_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "SECONDS_BETWEEN", 3600.0)
    opened = Opened()
    client = RefCountedClient(opened)
    for _ in range(3 * FAILURES_IN_A_ROW):
        await fail(client, ConnectionResetError())
    assert (opened.opened, opened.closed) == (1, [])


async def test_closing_closes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened()
    client = RefCountedClient(opened)
    async with client.lend():
        for _ in range(FAILURES_IN_A_ROW):
            await fail(client, ConnectionResetError())
        async with client.lend():
            await client.close()
            assert sorted(opened.closed) == [1, 2]
    assert sorted(opened.closed) == [1, 2]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_store_works_again_over_a_new_client(r2) -> None:
    await r2.store.put("k", b"x")
    r2.server.faults.add("^HEAD", Reset(), times=None)
    for _ in range(FAILURES_IN_A_ROW):
        with pytest.raises(StoreUnavailable):
            await r2.store.head("k")
    r2.server.faults.clear()
    assert (await r2.store.head("k")).size == 1

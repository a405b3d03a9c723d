"""Which peers count as active, and how activity sorts the peers."""

import asyncio
from pathlib import Path

from tplr.errors import AccessDenied, StoreError, StoreUnavailable
from tplr.exchange import activity
from tplr.exchange.activity import PeerGroups, active_peers
from tplr.exchange.gather import gather
from tplr.exchange.state_objects import state_rules
from tplr.keys import gradient_key
from tplr.localnet.accounts import key_table, new_account
from tplr.resources import LocalMachine, Resources
from tplr.schemas import ANYTIME, ObjectInfo
from tplr.storage import MemoryStore, S3Connections, s3_http
from tplr.testing.s3server import Delay, serve


class Counting(MemoryStore):
    """Counts HEADs; the first ones raise ``errors``."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.heads = 0
        self.errors = list(errors)

    async def head(self, key: str) -> ObjectInfo:
        self.heads += 1
        if self.errors:
            raise self.errors.pop(0)
        return await super().head(key)


async def test_active_is_who_uploaded_lately() -> None:
    stores = {uid: Counting() for uid in (1, 2, 3)}
    await stores[1].put(gradient_key(9, 1, "1"), b"x")
    await stores[2].put(gradient_key(6, 2, "1"), b"x")  # too long ago
    await stores[3].put(gradient_key(9, 1, "1"), b"x")  # another uid's key
    assert await active_peers([3, 2, 1, 4], stores.get, range(9, 6, -1), "1") == ((1,), ())
    assert [store.heads for store in stores.values()] == [1, 3, 3]


async def test_a_store_that_fails_harms_only_its_owner(monkeypatch) -> None:
    monkeypatch.setattr(activity, "ANSWER_SECONDS", 1.0)
    stores = {
        1: Counting(StoreUnavailable("503")),  # one error, so it is asked again
        2: Counting(AccessDenied("403")),
        3: Counting(*[StoreUnavailable("503", retry_after=5.0)] * 9),
        4: Counting(),
        5: Counting(StoreError("metadata that nobody reads")),
    }
    for uid, store in stores.items():
        await store.put(gradient_key(9, uid, "1"), b"x")
    assert await active_peers(stores, stores.get, [9], "1") == ((1, 4), (3,))


async def test_any_number_of_buckets_that_hang_leaves_room_for_other_requests(tmp_path: Path) -> None:
    """A validator looks for active peers, checks their reports and gathers their updates while it votes."""
    account = new_account()
    largest = Resources.of(LocalMachine(cores=64, memory=2**40, device="cpu")).gather_peers
    async with (
        serve(tmp_path, key_table([account])) as server,
        S3Connections(server.endpoint) as connections,
        asyncio.TaskGroup() as group,
    ):
        store = connections.store(account.writable)
        await store.put("ballot", b"x")
        hanging = server.faults.add("^HEAD .*/gradient-", Delay(3600), times=None)
        stores = dict.fromkeys(range(256), store)
        rules = state_rules("gradient", 9, "1", max_bytes=1, timeout=60.0, bounds=ANYTIME)
        tasks = [
            group.create_task(active_peers(stores, stores.get, [9], "1")),
            group.create_task(gather(stores, rules, concurrency=largest)),
        ]
        try:
            async with asyncio.timeout(60.0):  # with six processes on two cores it took 12 s
                while hanging.seen < activity.CONCURRENCY + largest:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            async with asyncio.timeout(s3_http.READ_TIMEOUT / 2):  # a request that hangs keeps its thread for all of it
                assert await store.get("ballot", max_bytes=1) == b"x"
        finally:
            for task in tasks:
                task.cancel()


def test_groups() -> None:
    stakes = {1: 10.0, 2: 20_000.0, 3: 20_000.1, 5: 0.0}
    first = PeerGroups().next([5, 3, 2, 1, 99], stakes, 20_000)
    assert first == PeerGroups(active=(1, 2, 3, 5), eval=(1, 2, 5))
    second = first.next([3, 5], stakes, 20_000)
    assert second == PeerGroups(active=(3, 5), eval=(5,), newly_inactive=(1, 2))
    assert second.next([1, 3, 5], stakes, 20_000) == PeerGroups(active=(1, 3, 5), eval=(1, 5))


def test_who_can_not_be_reached_is_not_called_inactive() -> None:
    stakes = {1: 10.0, 2: 10.0, 3: 10.0}
    before = PeerGroups(active=(1, 2, 3), eval=(1, 2, 3))
    after = before.next([1], stakes, 20_000, unknown=[3, 99])
    assert after == PeerGroups(active=(1,), eval=(1,), newly_inactive=(2,), unknown=(3,))

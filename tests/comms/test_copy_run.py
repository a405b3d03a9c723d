"""A validator copies a run's documents from the electors, so that it has them when it becomes an elector."""

from types import SimpleNamespace
from typing import Any

import pytest
from signers import signer

from tplr.chain.electors import Elector, Electors
from tplr.comms.peers import PeerLists
from tplr.errors import AccessDenied, StoreUnavailable
from tplr.exchange.documents import put_document
from tplr.exchange.envelope import WHOLE_RUN, Signer
from tplr.exchange.peers import post_peer_list, published_lists
from tplr.keys import start_window_key
from tplr.schemas import ObjectInfo, PeerList, StartWindow
from tplr.storage import MemoryStore, ObjectStore


class NotListed(MemoryStore):
    """Answers all requests but listings."""

    async def list(self, *_: Any, **__: Any) -> list[ObjectInfo]:
        raise AccessDenied("this key may not list")


class Heir(PeerLists):
    """A validator with an empty bucket, and three electors that have lists from some windows on."""

    uid: Any = 3
    signer: Any = signer(3)
    electors: Any = Electors(tuple(Elector(uid, signer(uid).hotkey, stake) for uid, stake in enumerate((40, 30, 30))))

    def __init__(self) -> None:
        self._version = "1"
        self.stores: dict[int, ObjectStore] = {uid: MemoryStore(str(uid)) for uid in range(4)}
        self.own_store = self.stores[self.uid]
        self.blocks_per_window = 10
        self._metagraph: Any = SimpleNamespace(block=1000)

    def store_of(self, uid: int) -> ObjectStore:
        return self.stores[uid]

    def author(self, uid: int, version: str | None = None) -> Signer:
        return signer(uid)

    async def copied(self, *lists: tuple[int, ...]) -> set[int]:
        """Return the first windows of the lists that it has after two attempts; ``lists`` are those of each elector."""
        for uid, firsts in enumerate(lists):
            start, store = StartWindow(start_window=10), self.stores[uid]
            await put_document(store, start_window_key("1"), start, window=WHOLE_RUN, signer=signer(uid))
            for first in firsts:
                listed = PeerList(peers=(1,), initial_selection=False, sync_window=1, first_effective_window=first)
                await post_peer_list(store, listed, signer(uid))
        for _ in range(2):
            await self.copy_run(horizon=100)
        return await published_lists(self.own_store, self.signer)


async def test_lists_are_copied_that_most_have_though_none_has_all() -> None:
    """Two electors were absent, at different times; an elector with more lists than the others adds nothing."""
    assert await Heir().copied((10, 20, 30, 40), (10, 30, 40), (10, 20, 40, 99)) == {10, 20, 30, 40}


async def test_a_list_that_nobody_can_read_any_more_stops_no_other() -> None:
    heir = Heir()
    for uid in range(3):
        others = signer((uid + 1) % 3)  # the hotkeys were swapped since
        listed = PeerList(peers=(1,), initial_selection=False, sync_window=1, first_effective_window=20)
        await post_peer_list(heir.stores[uid], listed, others)
    assert await heir.copied((10, 30), (10, 30), (10, 30)) == {10, 30}


async def test_nothing_is_copied_while_half_of_the_stake_does_not_answer() -> None:
    heir = Heir()
    await heir.copied((), (), ())
    heir.stores |= {0: NotListed(), 1: NotListed()}
    with pytest.raises(StoreUnavailable, match=r"peer lists of uids \[0, 1\]"):
        await heir.copied((20,), (20,), (20,))

"""Peer lists: which one is effective in a window, and that a published list never changes."""

import pytest
from signers import signed, signer

from tplr.errors import PayloadError, PreconditionFailed
from tplr.exchange.peers import get_peer_list, post_peer_list
from tplr.keys import peers_key
from tplr.schemas import PeerList
from tplr.storage import MemoryStore

ME = signer()


def peer_list(first: int, peers: tuple[int, ...]) -> PeerList:
    return PeerList(peers=peers, initial_selection=False, sync_window=first - 2, first_effective_window=first)


async def test_newest_effective_list_holds() -> None:
    store = MemoryStore()
    for first in (5, 9, 100):
        await post_peer_list(store, peer_list(first, (first,)), ME)
    await post_peer_list(store, peer_list(50, (0,)), signer(version="2"))
    await store.put("peers_7_v1.json.bak", b"not a list")
    found = {window: await get_peer_list(store, ME, window) for window in (4, 5, 8, 9, 60, 100, 1000)}
    assert {window: one and one.peers for window, one in found.items()} == {
        4: None,
        5: (5,),
        8: (5,),
        9: (9,),
        60: (9,),
        100: (100,),
        1000: (100,),
    }


async def test_published_list_is_never_changed() -> None:
    store = MemoryStore()
    await post_peer_list(store, peer_list(5, (1, 2)), ME)
    with pytest.raises(PreconditionFailed):
        await post_peer_list(store, peer_list(5, (3,)), ME)
    found = await get_peer_list(store, ME, 5)
    assert found is not None
    assert found.peers == (1, 2)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"peers": [1]}',
        b'{"peers": [-1], "initial_selection": true, "sync_window": 1, "first_effective_window": 5}',
        b'{"peers": [70000], "initial_selection": true, "sync_window": 1, "first_effective_window": 5}',
        b'{"peers": ["1"], "initial_selection": true, "sync_window": 1, "first_effective_window": 5}',
        b'{"peers": [1], "initial_selection": true, "sync_window": 1, "first_effective_window": 5, "more": 0}',
        b"[" * 50_000,
        b'{"peers": [' + b"9" * 5000 + b"]}",
        b"\xff\xfe",
    ],
)
async def test_anything_but_a_peer_list_is_refused_with_a_reason(body: bytes) -> None:
    store = MemoryStore()
    for raw in (body, signed(body, PeerList, window=5, by=ME)):
        await store.put(peers_key(5, "1"), raw)
        with pytest.raises(PayloadError, match=r"^peers_5_v1\.json: "):
            await get_peer_list(store, ME, 5)


async def test_a_list_of_another_window_or_author_is_refused() -> None:
    store = MemoryStore()
    for raw in (
        signed(peer_list(6, (1,)), PeerList, window=5, by=ME),
        signed(peer_list(5, (1,)), PeerList, window=6, by=ME),
        signed(peer_list(5, (1,)), PeerList, window=5, by=signer(6)),
    ):
        await store.put(peers_key(5, "1"), raw)
        with pytest.raises(PayloadError, match=r"^peers_5_v1\.json: "):
            await get_peer_list(store, ME, 5)


async def test_newest_and_previous_list() -> None:
    store = MemoryStore()
    assert await get_peer_list(store, ME) is None
    await post_peer_list(store, peer_list(5, (5,)), ME)
    assert await get_peer_list(store, ME, fetch_previous=True) is None
    for first in (9, 100):
        await post_peer_list(store, peer_list(first, (first,)), ME)
    newest = await get_peer_list(store, ME)
    previous = await get_peer_list(store, ME, fetch_previous=True)
    before_50 = await get_peer_list(store, ME, 50, fetch_previous=True)
    assert [one and one.peers for one in (newest, previous, before_50)] == [(100,), (9,), (5,)]

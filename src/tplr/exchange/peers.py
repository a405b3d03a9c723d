"""Whose updates are gathered: the peer lists that the leading validator publishes."""

from tplr.exchange.documents import get_document, put_document
from tplr.keys import PEERS_PREFIX, parse_peers_key, peers_key
from tplr.schemas import PeerList
from tplr.storage import ObjectStore


async def post_peer_list(store: ObjectStore, peers: PeerList, version: str) -> None:
    """Publish ``peers``. A list is written once: PreconditionFailed if another one for that window exists."""
    await put_document(store, peers_key(peers.first_effective_window, version), peers, create_only=True)


async def get_peer_list(
    store: ObjectStore, version: str, window: int | None = None, *, fetch_previous: bool = False
) -> PeerList | None:
    """The list that holds in ``window``: the newest whose first effective window is not after it, or None.

    Args:
        window: None for the newest list published, in force or to come.
        fetch_previous: the one before that.
    """
    listed = await store.list(PEERS_PREFIX)
    starts = (parse_peers_key(info.key, version) for info in listed)
    usable = sorted(start for start in starts if start is not None and (window is None or start <= window))
    back = 2 if fetch_previous else 1
    if len(usable) < back:
        return None
    return await get_document(store, peers_key(usable[-back], version), PeerList)

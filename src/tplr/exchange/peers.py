"""Peer lists: the leading validator publishes the uids whose updates are gathered."""

from tplr.exchange.documents import READ_SECONDS, get_document, put_document
from tplr.keys import PEERS_PREFIX, parse_peers_key, peers_key
from tplr.schemas import PeerList
from tplr.storage import ObjectStore
from tplr.storage.many import list_objects


async def post_peer_list(store: ObjectStore, peers: PeerList, version: str) -> None:
    """Publish a list, once for a window. Raises PreconditionFailed if another one exists."""
    await put_document(store, peers_key(peers.first_effective_window, version), peers, create_only=True)


async def copy_peer_lists(source: ObjectStore, target: ObjectStore, version: str) -> None:
    """Copy the lists that ``target`` lacks from ``source``. A list never changes, so a copy stays valid."""
    missing = await _published(source, version) - await _published(target, version)
    for first in sorted(missing):
        await post_peer_list(target, await _get(source, first, version), version)


async def get_peer_list(
    store: ObjectStore, version: str, window: int | None = None, *, fetch_previous: bool = False
) -> PeerList | None:
    """The list in effect in ``window``: the newest whose first effective window is not after it, or None.

    While the store is unavailable, each of the two requests is retried for up to ``READ_SECONDS``.

    Args:
        window: None for the newest published list, in effect or not yet.
        fetch_previous: the one before that.
    """
    usable = sorted(first for first in await _published(store, version) if window is None or first <= window)
    back = 2 if fetch_previous else 1
    if len(usable) < back:
        return None
    return await _get(store, usable[-back], version)


async def _get(store: ObjectStore, first: int, version: str) -> PeerList:
    return await get_document(store, peers_key(first, version), PeerList, retry=True)


async def _published(store: ObjectStore, version: str) -> set[int]:
    """First effective windows of all lists."""
    listed = await list_objects(store, PEERS_PREFIX, deadline_seconds=READ_SECONDS)
    firsts = (parse_peers_key(info.key, version) for info in listed)
    return {first for first in firsts if first is not None}

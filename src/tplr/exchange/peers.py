"""Peer lists: each elector publishes the uids whose updates are gathered."""

from tplr.errors import PayloadError
from tplr.exchange.documents import READ_SECONDS, get_document, put_document
from tplr.exchange.envelope import Author, Signer
from tplr.keys import PEERS_PREFIX, parse_peers_key, peers_key
from tplr.schemas import PeerList
from tplr.storage import ObjectStore
from tplr.storage.many import list_objects


async def post_peer_list(store: ObjectStore, peers: PeerList, signer: Signer) -> None:
    """Publish a list, once for a window. Raises PreconditionFailed if a different one exists."""
    first = peers.first_effective_window
    key = peers_key(first, signer.run.version)
    await put_document(store, key, peers, window=first, signer=signer, create_only=True)


async def get_peer_list(
    store: ObjectStore, author: Author, window: int | None = None, *, fetch_previous: bool = False
) -> PeerList | None:
    """Read the list in effect in ``window``, or None: the newest whose first effective window is not after it.

    While the store is unavailable, each of the two requests is retried for up to ``READ_SECONDS``.

    Args:
        window: None for the newest published list, even if it is not yet in effect.
        fetch_previous: read the list before that one instead.
    """
    usable = sorted(first for first in await published_lists(store, author) if window is None or first <= window)
    back = 2 if fetch_previous else 1
    if len(usable) < back:
        return None
    return await read_list(store, usable[-back], author)


async def read_list(store: ObjectStore, first: int, author: Author) -> PeerList:
    """Read the list whose first effective window is ``first``. Raises as ``documents.get_document``."""
    key = peers_key(first, author.run.version)
    found = await get_document(store, key, PeerList, window=first, author=author, retry=True)
    if found.first_effective_window != first:
        raise PayloadError(f"{key}: takes effect in window {found.first_effective_window}")
    return found


async def published_lists(store: ObjectStore, author: Author) -> set[int]:
    """Return the first effective windows of all published lists."""
    listed = await list_objects(store, PEERS_PREFIX, deadline_seconds=READ_SECONDS)
    firsts = (parse_peers_key(info.key, author.run.version) for info in listed)
    return {first for first in firsts if first is not None}

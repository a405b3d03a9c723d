"""Whose updates are gathered: the peer lists that the leading validator publishes, and who uploads at all."""

import asyncio
from collections.abc import Callable, Iterable

from tplr.errors import AccessDenied, ObjectNotFound, StoreUnavailable
from tplr.exchange.documents import get_document, put_document
from tplr.keys import PEERS_PREFIX, gradient_key, parse_peers_key, peers_key
from tplr.schemas import PeerList
from tplr.storage import ObjectStore

CONCURRENCY = 16


async def post_peer_list(store: ObjectStore, peers: PeerList, version: str) -> None:
    """Publish ``peers``. A list is written once: PreconditionFailed if one for that window exists."""
    await put_document(store, peers_key(peers.first_effective_window, version), peers, create_only=True)


async def get_peer_list(store: ObjectStore, window: int, version: str) -> PeerList | None:
    """The list that holds in ``window``: the newest whose first effective window is not after it, or None."""
    listed = await store.list(PEERS_PREFIX)
    starts = (parse_peers_key(info.key, version) for info in listed)
    effective = max((start for start in starts if start is not None and start <= window), default=None)
    if effective is None:
        return None
    return await get_document(store, peers_key(effective, version), PeerList)


async def active_peers(
    uids: Iterable[int], store_of: Callable[[int], ObjectStore | None], windows: Iterable[int], version: str
) -> tuple[int, ...]:
    """Those of ``uids``, ascending, that uploaded in any of ``windows``; no answer counts as no upload."""
    slots = asyncio.Semaphore(CONCURRENCY)
    recent = tuple(windows)
    order = sorted(set(uids))

    async def uploaded(uid: int) -> bool:
        store = store_of(uid)
        if store is None:
            return False
        for window in recent:
            try:
                async with slots:
                    await store.head(gradient_key(window, uid, version))
            except ObjectNotFound:
                continue
            except (AccessDenied, StoreUnavailable):
                return False
            return True
        return False

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(uploaded(uid)) for uid in order]
    return tuple(uid for uid, task in zip(order, tasks, strict=True) if task.result())

"""Who uploads at all, and into which groups that sorts the peers."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tplr.errors import ObjectNotFound, StoreError
from tplr.keys import gradient_key
from tplr.storage import ObjectStore
from tplr.storage.retry import with_retry

CONCURRENCY = 64
ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class PeerGroups:
    """Uids, each group ascending.

    Attributes:
        active: uploaded lately.
        eval: those of them whose updates are evaluated: active, and with no more stake than a miner has.
        newly_inactive: were in ``eval`` the last time and are not active any more.
    """

    active: tuple[int, ...] = ()
    eval: tuple[int, ...] = ()
    newly_inactive: tuple[int, ...] = ()

    def next(self, active: Iterable[int], stakes: Mapping[int, float], stake_limit: float) -> "PeerGroups":
        """The groups now that ``active`` upload. A uid that is not in ``stakes`` is not registered: in no group."""
        order = tuple(sorted(uid for uid in set(active) if uid in stakes))
        return PeerGroups(
            active=order,
            eval=tuple(uid for uid in order if stakes[uid] <= stake_limit),
            newly_inactive=tuple(uid for uid in self.eval if uid not in order),
        )


async def active_peers(
    uids: Iterable[int], store_of: Callable[[int], ObjectStore | None], windows: Iterable[int], version: str
) -> tuple[int, ...]:
    """Those of ``uids``, ascending, that uploaded in any of ``windows``, looked through in their order.

    By HEAD, newest window first: an active peer costs one, another one ``len(windows)``. R2 bills 0.36 USD for a
    million HEADs and 4.50 for a million LISTs (class B and A, developers.cloudflare.com/r2/pricing), so listing would
    pay only from 13 windows on, and an owner who fills its bucket could make a listing as long as it likes. A bucket
    that does not answer a HEAD within ``ANSWER_SECONDS`` counts as without upload.
    """
    slots = asyncio.Semaphore(CONCURRENCY)
    recent = tuple(windows)
    order = sorted(set(uids))

    async def uploaded(uid: int) -> bool:
        store = store_of(uid)
        if store is None:
            return False
        for window in recent:
            key = gradient_key(window, uid, version)
            try:
                async with slots:
                    await with_retry(lambda key=key: store.head(key), deadline_seconds=ANSWER_SECONDS)
            except ObjectNotFound:
                continue
            except StoreError:
                return False
            return True
        return False

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(uploaded(uid)) for uid in order]
    return tuple(uid for uid, task in zip(order, tasks, strict=True) if task.result())

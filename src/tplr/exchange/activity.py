"""Who uploads at all, and into which groups that sorts the peers."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tplr.errors import ObjectNotFound, StoreError, StoreUnavailable
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
        unknown: whether they upload could not be seen, perhaps by our own fault; in none of the others.
    """

    active: tuple[int, ...] = ()
    eval: tuple[int, ...] = ()
    newly_inactive: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()

    def next(
        self, active: Iterable[int], stakes: Mapping[int, float], stake_limit: float, *, unknown: Iterable[int] = ()
    ) -> "PeerGroups":
        """The groups now that ``active`` upload. A uid that is not in ``stakes`` is not registered: in no group."""
        unseen = tuple(sorted(uid for uid in set(unknown) if uid in stakes))
        order = tuple(sorted(uid for uid in set(active) if uid in stakes))
        return PeerGroups(
            active=order,
            eval=tuple(uid for uid in order if stakes[uid] <= stake_limit),
            newly_inactive=tuple(uid for uid in self.eval if uid not in order and uid not in unseen),
            unknown=unseen,
        )


async def active_peers(
    uids: Iterable[int], store_of: Callable[[int], ObjectStore | None], windows: Iterable[int], version: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those of ``uids`` that uploaded in any of ``windows``, looked through in their order, and those not known.

    By HEAD, newest window first: an active peer costs one, another one ``len(windows)``. R2 bills 0.36 USD for a
    million HEADs and 4.50 for a million LISTs (class B and A, developers.cloudflare.com/r2/pricing), so listing would
    pay only from 13 windows on, and an owner who fills its bucket could make a listing as long as it likes. Of a bucket
    that does not answer a HEAD within ``ANSWER_SECONDS`` nothing is known; one that refuses the credentials on chain or
    the look at its object is without upload. Both ascend.
    """
    slots = asyncio.Semaphore(CONCURRENCY)
    recent = tuple(windows)
    order = sorted(set(uids))

    async def uploaded(uid: int) -> bool | None:
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
            except StoreUnavailable:
                return None
            except StoreError:
                return False
            return True
        return False

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(uploaded(uid)) for uid in order]
    found = dict(zip(order, (task.result() for task in tasks), strict=True))
    return tuple(uid for uid in order if found[uid]), tuple(uid for uid in order if found[uid] is None)

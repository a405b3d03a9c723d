"""Finds the peers that upload, and groups peers by their activity."""

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
        active: uploaded recently.
        eval: active, with at most a miner's stake; their updates are evaluated.
        newly_inactive: in the previous ``eval`` group and no longer active.
        unknown: could not be checked, perhaps because of a fault at this node; in none of the other groups.
    """

    active: tuple[int, ...] = ()
    eval: tuple[int, ...] = ()
    newly_inactive: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()

    def next(
        self, active: Iterable[int], stakes: Mapping[int, float], stake_limit: float, *, unknown: Iterable[int] = ()
    ) -> "PeerGroups":
        """Return the next groups. A uid that is not in ``stakes`` is not registered and is in no group."""
        unseen = tuple(sorted(uid for uid in set(unknown) if uid in stakes))
        order = tuple(sorted(uid for uid in set(active) if uid in stakes))
        return PeerGroups(
            active=order,
            eval=tuple(uid for uid in order if stakes[uid] <= stake_limit),
            newly_inactive=tuple(uid for uid in self.eval if uid not in order and uid not in unseen),
            unknown=unseen,
        )


class Activity(NamedTuple):
    """The uids that uploaded, and the uids that could not be checked; both ascending."""

    active: tuple[int, ...]
    unknown: tuple[int, ...]


async def active_peers(
    uids: Iterable[int], store_of: Callable[[int], ObjectStore | None], windows: Iterable[int], version: str
) -> Activity:
    """Find the ``uids`` that uploaded in any of ``windows``.

    An active peer costs one HEAD for each window up to its newest upload, an inactive peer ``len(windows)``. R2 bills
    0.36 USD for a million HEADs and 4.50 for a million LISTs (class B and A, developers.cloudflare.com/r2/pricing).
    Listing would be cheaper only from 13 windows on, and an owner who fills its bucket could make a listing arbitrarily
    long.

    A uid is unknown if its bucket does not answer a HEAD within ``ANSWER_SECONDS``. It counts as inactive if its bucket
    refuses the credentials on chain or the request.

    Args:
        windows: searched in this order.
    """
    slots = asyncio.Semaphore(CONCURRENCY)
    recent = tuple(windows)
    order = sorted(set(uids))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_uploaded(uid, store_of(uid), recent, version, slots)) for uid in order]
    found = dict(zip(order, (task.result() for task in tasks), strict=True))
    unknown = tuple(uid for uid in order if found[uid] is None)
    return Activity(tuple(uid for uid in order if found[uid]), unknown)


async def _uploaded(
    uid: int, store: ObjectStore | None, windows: Iterable[int], version: str, slots: asyncio.Semaphore
) -> bool | None:
    """Return whether ``uid`` uploaded in any of ``windows``, or None if its bucket does not answer."""
    if store is None:
        return False
    for window in windows:
        key = gradient_key(window, uid, version)
        try:
            async with slots:
                await with_retry(functools.partial(store.head, key), deadline_seconds=ANSWER_SECONDS)
        except ObjectNotFound:
            continue
        except StoreUnavailable:
            return None
        except StoreError:
            return False
        return True
    return False

"""Finds copies among the updates of a window by the rules of documented validators."""

import asyncio
from collections.abc import Sequence

from tplr.comms import Comms
from tplr.compress.payload import Update
from tplr.errors import StoreError
from tplr.exchange.gather import GatheredUpdate
from tplr.hparams import HParams
from tplr.keys import commit_key, gradient_key
from tplr.node.observation import Observation
from tplr.scoring.documented.copies import find_copies
from tplr.scoring.documented.overlap import sample_chunks, traits


async def note_copies(
    seen: Observation, updates: Sequence[GatheredUpdate[Update]], comms: Comms, hparams: HParams, seed: int
) -> None:
    """Record which of these updates are copies of another one.

    Args:
        seed: of the compared chunks, which can't be known before the window ends.
    """
    if not updates:
        return
    fixed = await _fixed_times(updates, seen.window, comms, hparams)
    sample = sample_chunks(updates[0].update.spec, seed)

    def find() -> dict[int, int]:
        return find_copies({one.uid: traits(one.update, sample) for one in updates}, fixed)

    copies = await asyncio.to_thread(find)
    for one in updates:
        source = copies.get(one.uid)
        seen.note(one.uid, copied="" if source is None else "copied_indices", copied_from=source)


async def _fixed_times(
    updates: Sequence[GatheredUpdate[Update]], window: int, comms: Comms, hparams: HParams
) -> dict[int, float | None]:
    """Return when the bytes of each update were fixed, in Unix seconds of its store; None if unknown."""
    make_key = commit_key if hparams.require_commit else gradient_key

    async def one(uid: int) -> float | None:
        store = comms.store_of(uid)
        key = make_key(window, uid, hparams.version)
        try:
            return None if store is None else (await store.head(key)).last_modified
        except StoreError:
            return None

    async with asyncio.TaskGroup() as group:
        # Updates of a published set lack this time.
        tasks = {update.uid: group.create_task(one(update.uid)) for update in updates if not update.fixed}
    return {update.uid: update.fixed or tasks[update.uid].result() for update in updates}

"""Deletes old objects from buckets and folders."""

from collections.abc import Iterable

from tplr.hparams import HParams
from tplr.keys import parse_window_key
from tplr.storage import ObjectStore
from tplr.storage.many import delete_many, list_objects

# Objects of every window. Peer lists and the start window stay: a node that catches up needs them.
EACH_WINDOW = ("gradient", "commit", "debug", "scores", "scores-seal", "vote", "echo", "status")
# The part of these that confirms checkpoints, and is kept for as long as they are.
REPORTS = ("debug",)
# What electors and aggregators keep for as long as checkpoints: decisions, aggregates, and updates of other uids.
AGGREGATES = ("aggregator", "gradient")


def windows_of_checkpoints(hparams: HParams) -> int:
    """Return for how many windows a node keeps what others need that start from a kept checkpoint."""
    return max(hparams.gradient_retention_windows, hparams.checkpoint_frequency * (hparams.checkpoints_kept + 1))


async def delete_stale(
    store: ObjectStore, *, uid: int | None, before: int, version: str, kinds: Iterable[str] = EACH_WINDOW
) -> int:
    """Delete the objects of ``uid`` (None: of all) of windows before ``before``; returns their number.

    Raises StoreError.
    """
    keys = [
        info.key
        for kind in kinds
        for info in await list_objects(store, f"{kind}-")
        if (key := parse_window_key(info.key, version))
        and key.window < before
        and (uid is None or key.uid in (uid, None))
    ]
    await delete_many(store, keys)
    return len(keys)


async def delete_old_checkpoints(store: ObjectStore, *, uid: int, keep_last: int, version: str) -> int:
    """Delete all but the newest ``keep_last`` checkpoints of ``uid``; returns the number of deleted objects.

    Raises StoreError.
    """
    listed = [parse_window_key(info.key, version) for info in await list_objects(store, "checkpoint-")]
    windows = sorted({key.window for key in listed if key and key.uid == uid})
    if len(windows) <= keep_last:
        return 0
    # Newer checkpoints may appear during the call; the oldest one to keep does not change.
    oldest_kept = windows[-keep_last] if keep_last > 0 else windows[-1] + 1
    return await delete_stale(store, uid=uid, before=oldest_kept, version=version, kinds=("checkpoint",))

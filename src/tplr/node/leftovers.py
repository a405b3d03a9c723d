"""Finds and deletes what former runs, uids, uploads and tests left in a node's own bucket: ``tplr clean``.

A node itself deletes only old objects of its present uid and run (``exchange/retention.py``), and aborts
uploads only at its start (``stale_uploads.py``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from tplr.chain.hotkeys import load_hotkey
from tplr.config import Kind
from tplr.console import Console
from tplr.errors import ConfigError
from tplr.exchange.retention import windows_of_checkpoints
from tplr.hparams import HParams
from tplr.keys import RUN_PREFIXES, parse_run_key
from tplr.planner.traffic import DOLLARS_PER_GB_MONTH
from tplr.schemas import ObjectInfo
from tplr.storage import ObjectStore
from tplr.storage.base import StoredParts, UnfinishedUpload
from tplr.storage.many import delete_many, list_objects
from tplr.storage.retry import with_retry
from tplr.storage.upload import abort_each, list_stored

if TYPE_CHECKING:
    from tplr.node.network_reader import NetworkReader

DAY_SECONDS = 86400.0
IDLE_DAYS = 3  # a group of objects, or an upload, that was written to later may be that of another running node
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class ObjectGroup:
    """The objects of one version and one uid in a bucket.

    ``uid`` is None for objects that belong to no uid, and ``version`` for the objects that test a bucket.
    """

    version: int | None
    uid: int | None
    objects: Sequence[ObjectInfo]

    @property
    def name(self) -> str:
        if self.version is None:
            return "probes"
        return f"{self.version}/{'-' if self.uid is None else self.uid}"

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(one.size for one in self.objects)

    @property
    def last_written(self) -> float:
        """Unix seconds by the store's clock."""
        return max(one.last_modified for one in self.objects)

    @property
    def windows(self) -> list[int]:
        """Windows of the objects, ascending; an object of the run's start has none."""
        found = {key.window for one in self.objects if (key := parse_run_key(one.key))}
        return sorted(window for window in found if window is not None)

    async def delete(self, store: ObjectStore) -> str:
        """Delete the objects; return what was done. Raises StoreError."""
        await delete_many(store, [one.key for one in self.objects])
        return f"{len(self.objects)} objects deleted"


@dataclass(frozen=True)
class UploadGroup(ObjectGroup):
    """Unfinished uploads of objects of all versions and uids; ``size`` is that of their parts.

    Attributes:
        idle: whether none of them got a part within ``IDLE_DAYS``.
        uploads: one for each of ``objects``.
    """

    idle: bool
    uploads: Sequence[UnfinishedUpload]

    @property
    def name(self) -> str:
        return "uploads" if self.idle else "recent-uploads"

    async def delete(self, store: ObjectStore) -> str:
        multipart = store.multipart
        assert multipart
        await with_retry(lambda: abort_each(multipart, self.uploads), deadline_seconds=DEADLINE_SECONDS)
        return f"{len(self.uploads)} aborted"


@dataclass(frozen=True, kw_only=True)
class PresentRun:
    """What is in use in a bucket.

    Attributes:
        versions: of the run, past and future ones.
        uid: of this hotkey; None if it has none.
        others: other uids of the run that have this bucket on chain.
        needed_from: first window whose objects nodes still read.
        shared: whether other nodes of the run write to this bucket without having it on chain.
    """

    versions: frozenset[int]
    uid: int | None
    others: frozenset[int]
    needed_from: int
    shared: bool

    @classmethod
    def of(cls, hparams: HParams, window: int, *, uid: int | None, others: frozenset[int], shared: bool) -> PresentRun:
        """Return it as of ``window``."""
        versions = frozenset({hparams.spec_version, *(one.spec_version for one in hparams.upgrades)})
        needed_from = window - windows_of_checkpoints(hparams)
        return cls(versions=versions, uid=uid, others=others, needed_from=needed_from, shared=shared)

    def use_of(self, group: ObjectGroup, *, now: float) -> str | None:
        """Return why a group must be kept; None if it is left over."""
        if group.version in self.versions:
            if self.shared or group.uid in (None, self.uid):
                return "of this run"
            if group.uid in self.others:
                return f"uid {group.uid} of this run uses this bucket"
            if any(window >= self.needed_from for window in group.windows):
                return f"nodes read windows from {self.needed_from} on"
        days = (now - group.last_written) / DAY_SECONDS
        return None if days >= IDLE_DAYS else f"written to within {IDLE_DAYS} days"


async def list_groups(store: ObjectStore) -> list[ObjectGroup]:
    """List the objects of all runs in a bucket, and those that tested it; none with other keys. Raises StoreError."""
    found: dict[tuple[int | None, int | None], list[ObjectInfo]] = defaultdict(list)
    for prefix in RUN_PREFIXES:
        for one in await list_objects(store, prefix):
            if key := parse_run_key(one.key):
                found[key.version, key.uid].append(one)
    order = sorted(found, key=lambda group: tuple(-1 if part is None else part for part in group))
    return [ObjectGroup(version, uid, found[version, uid]) for version, uid in order]


async def list_uploads(store: ObjectStore, *, now: float) -> list[ObjectGroup]:
    """List the unfinished uploads of the same objects: those that are left over, and the others. Raises StoreError."""
    if (multipart := store.multipart) is None:
        return []

    async def look() -> list[tuple[UnfinishedUpload, StoredParts]]:
        return await list_stored(multipart, [one for one in await multipart.unfinished() if parse_run_key(one.key)])

    found: dict[bool, list[tuple[UnfinishedUpload, StoredParts]]] = defaultdict(list)
    for upload, stored in await with_retry(look, deadline_seconds=DEADLINE_SECONDS):
        found[now - stored.last_written >= IDLE_DAYS * DAY_SECONDS].append((upload, stored))
    return [
        UploadGroup(
            None,
            None,
            [
                ObjectInfo(key=upload.key, size=stored.size, etag="", last_modified=stored.last_written)
                for upload, stored in some
            ],
            idle,
            [upload for upload, _ in some],
        )
        for idle, some in sorted(found.items())
    ]


async def clean(network: NetworkReader, kind: Kind, names: Sequence[str]) -> int:
    """Print the groups of objects in this environment's bucket of ``kind``; delete those with the given ``names``.

    Raises:
        ConfigError: no group has that name, or one must be kept: nothing is deleted.
        StoreError: the bucket does not answer; of the named groups, objects may have been deleted.
    """
    args, comms = network.arguments, network.comms
    bucket = network.environment.bucket(kind, "write")
    hotkey = load_hotkey(args.wallet_path, args.wallet_name, args.wallet_hotkey).ss58_address
    uid = comms.metagraph.uid_of(hotkey)
    others = frozenset(one for one, theirs in comms.commitments.items() if theirs.name == bucket.name)
    run = PresentRun.of(network.hparams, comms.clock.window, uid=uid, others=others - {uid}, shared=kind != "gradients")
    store, now = network.connections.store(bucket), time.time()
    listed = [*await list_groups(store), *await list_uploads(store, now=now)]
    groups = {group.name: group for group in listed}
    uses = {name: run.use_of(group, now=now) for name, group in groups.items()}
    Console().print(_table(groups, uses, bucket.name, now=now) if groups else f"no objects of nodes in {bucket.name}")
    problems = [f"--delete {name}: the bucket has no such group" for name in names if name not in groups]
    problems += [f"--delete {name}: it is kept: {uses[name]}" for name in names if uses.get(name)]
    if problems:
        raise ConfigError(problems)
    for group in (groups[name] for name in dict.fromkeys(names)):
        print(f"{group.name}: {await group.delete(store)}")  # noqa: T201
    return 0


def _table(groups: Mapping[str, ObjectGroup], uses: Mapping[str, str | None], bucket: str, *, now: float) -> Table:
    table = Table(title=f"objects of nodes in bucket {bucket}", title_justify="left")
    table.add_column("group", justify="right", no_wrap=True)  # it is typed after --delete
    for name in ("windows", "objects", "GB", "$ a month", "days old"):
        table.add_column(name, justify="right")
    table.add_column("use", overflow="fold")
    for name, group in groups.items():
        windows, size = group.windows, group.size / 1e9
        table.add_row(
            name,
            f"{windows[0]} to {windows[-1]}" if windows else "",
            str(len(group.objects)),
            f"{size:.2f}",
            f"{size * DOLLARS_PER_GB_MONTH:.2f}",
            f"{(now - group.last_written) / DAY_SECONDS:.1f}",
            uses[name] or f"left over: --delete {name}",
        )
    return table

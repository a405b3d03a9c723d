"""Publishes aggregates of decided sets; stores the updates on this node's disk first, so that they stay available."""

import asyncio
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from tplr.comms import Comms
from tplr.compress.payload import Update
from tplr.errors import PayloadError
from tplr.exchange.aggregates import IncludedSet, assemble, split
from tplr.exchange.gather import GatherResult
from tplr.files import atomic_write
from tplr.logging import logger
from tplr.node.failpoints import failpoint
from tplr.node.windows import WindowUpdates
from tplr.telemetry import Telemetry

# The name of a stored update. Aggregates, and incomplete files of a killed process, have other names.
_UPDATE = re.compile(r"window-[0-9]+-([0-9]+)-([0-9a-f]{64})")


def announce(telemetry: Telemetry, included: IncludedSet, seconds: float) -> None:
    """Emit the event of a window that is decided, or whose aggregate is published; ``seconds``: of work."""
    telemetry.emit(
        "aggregated",
        window=included.window,
        included=[one.uid for one in included.included],
        skipped=included.skipped,
        bytes=sum(one.size for one in included.included),
        success_rate=included.success_rate,
        seconds=seconds,
    )


class OwnAggregates:
    """Publishes the peers' own bytes, so that a window stays available even if the peers' buckets are emptied."""

    def __init__(self, comms: Comms, windows: WindowUpdates, folder: Path) -> None:
        """``folder`` keeps unpublished updates and aggregates."""
        self._comms = comms
        self._windows = windows
        self._folder = folder
        self._published: dict[int, Path] = {}
        self._kept: set[int] = set()

    async def keep(self, found: GatherResult[Update]) -> None:
        """Store the updates that this node found in a window, unless they are stored already. Raises StateError."""
        for one in found.updates:
            path = self._folder / f"window-{found.window}-{one.uid}-{one.sha256}"
            if not await asyncio.to_thread(path.exists):
                await asyncio.to_thread(atomic_write, path, one.update.body)
        self._kept.add(found.window)

    async def kept(self, window: int) -> GatherResult[Update] | None:
        """Load the updates of a window that were stored before a restart; None if there are none."""
        found = {}
        for path in await asyncio.to_thread(lambda: sorted(self._folder.glob(f"window-{window}-*-*"))):
            if (name := _UPDATE.fullmatch(path.name)) is None:
                continue
            try:
                body = await asyncio.to_thread(path.read_bytes)
                one = await asyncio.to_thread(self._windows.parsed, window, int(name[1]), body)
            except (OSError, PayloadError, ValueError) as error:
                logger.warning("%s not used: %s", path, error)
                continue
            if one.sha256 == name[2]:
                found[one.uid] = one
        self._kept.add(window)
        updates = tuple(found[uid] for uid in sorted(found))
        return GatherResult(window=window, updates=updates, skipped={}) if found else None

    async def publish(self, included: IncludedSet, own: GatherResult[Update] | None = None) -> None:
        """Publish a set's aggregate from the stored one, from ``own``, or from updates fetched from other nodes.

        Raises:
            PayloadError: no node can apply the set.
            StateError, StoreError, ChainUnavailable, WindowLost: the aggregate is not published.
        """
        await self._comms.put_aggregate(included, await self._body(included, own))
        self._published[included.window] = self.path(included)
        await failpoint("aggregated")

    def has_published(self, included: IncludedSet) -> bool:
        """Return whether the aggregate that was last published for the window is that of this set."""
        return self._published.get(included.window) == self.path(included)

    async def drop(self, window: int) -> None:
        """Delete the stored files of a window."""
        self._published.pop(window, None)
        self._kept.discard(window)
        for path in await asyncio.to_thread(lambda: [*self._folder.glob(f"window-{window}-*")]):
            await asyncio.to_thread(_delete, path)

    async def drop_before(self, window: int) -> None:
        """Delete the stored files of windows before ``window``, published or not: no node needs them any more."""
        self._published = {number: path for number, path in self._published.items() if number >= window}
        self._kept = {number for number in self._kept if number >= window}
        for path in await asyncio.to_thread(lambda: [*self._folder.glob("window-*-*")]):
            number = path.name.split("-")[1]
            if number.isdecimal() and int(number) < window:
                await asyncio.to_thread(_delete, path)

    async def _body(self, included: IncludedSet, own: GatherResult[Update] | None) -> bytes:
        path = self.path(included)
        try:
            body = await asyncio.to_thread(path.read_bytes)
            await asyncio.to_thread(split, str(path), body, included)
        except FileNotFoundError:
            pass
        except (OSError, PayloadError) as error:
            logger.warning("stored aggregate of window %d not used: %s", included.window, error)
        else:
            return body
        found = await self._windows.from_set(included, own)
        if found is None:
            raise PayloadError("its set includes an object that is not an update: no node can apply it")
        bodies = [one.update.body for one in found.updates]
        if included.window in self._kept:
            return await asyncio.to_thread(assemble, included, bodies)
        return await asyncio.to_thread(self._store, included, bodies)

    def _store(self, included: IncludedSet, bodies: Sequence[bytes]) -> bytes:
        body = assemble(included, bodies)
        atomic_write(self.path(included), body)
        return body

    def path(self, included: IncludedSet) -> Path:
        """Return the path of a set's stored aggregate; sets with the same updates share it."""
        digest = hashlib.sha256(repr([(one.uid, one.sha256) for one in included.included]).encode()).hexdigest()
        return self._folder / f"window-{included.window}-{digest[:16]}"


def _delete(path: Path) -> None:
    """Delete a stored file. One that stays costs only space, so this does not end a node whose disk fails."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s not deleted: %s", path, error)

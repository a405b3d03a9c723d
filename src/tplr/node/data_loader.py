"""Loads batches by uid and window, and prefetches those of the next window."""

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tplr.comms import Comms
from tplr.concurrency.prefetch import Prefetch
from tplr.node.sources import WindowDataSource
from tplr.seeds import seed_window


@dataclass(frozen=True)
class WindowBatches:
    """The batches of a uid in a window, or held-out batches.

    Attributes:
        digest: identifies the batches in an update (see ``WindowDataSource.digest``).
        batches: int64 (batches, batch_size, sequence_length).
    """

    digest: str
    batches: np.ndarray


class WindowDataLoader(AbstractAsyncContextManager["WindowDataLoader", None]):
    """Samples and loads batches; the ``async with`` block cancels an unused prefetch."""

    def __init__(self, source: WindowDataSource[Any], comms: Comms) -> None:
        self._source = source
        self._comms = comms
        self._prefetch: Prefetch[tuple[int, int], WindowBatches] = Prefetch(self._load_assigned, size=1)

    async def __aexit__(self, *_: object) -> None:
        await self._prefetch.__aexit__()

    async def assigned(self, uid: int, window: int) -> WindowBatches:
        """Load the batches that ``uid`` trains on in ``window``."""
        return await self._prefetch.take((uid, window))

    def read_ahead(self, uid: int, window: int) -> None:
        """Start loading ``assigned(uid, window)`` in the background; a later call replaces the prefetch."""
        self._prefetch.start((uid, window))

    async def digest(self, uid: int, window: int) -> str:
        """Return the digest of ``assigned(uid, window)`` without loading batches."""
        return self._source.digest(await self._sample_assigned(uid, window))

    async def held_out(self, window: int, hotkey: str, apart_from: Iterable[int] = ()) -> WindowBatches:
        """Load random batches for evaluations of ``window`` by the validator with this hotkey.

        They can't be predicted before the window's end. They are disjoint from those of the uids ``apart_from``.

        Raises:
            DataError: all sampled data are assigned to ``apart_from``.
        """
        block_hash = await self._comms.window_hash(window + 1)
        taken = [await self._sample_assigned(uid, window) for uid in apart_from]
        return await self._load(self._source.held_out(hotkey, block_hash, taken))

    async def _load_assigned(self, which: tuple[int, int]) -> WindowBatches:
        return await self._load(await self._sample_assigned(*which))

    async def _sample_assigned(self, uid: int, window: int) -> Any:
        return self._source.assigned(uid, window, await self._comms.window_hash(seed_window(window)))

    async def _load(self, sampled: Any) -> WindowBatches:
        return WindowBatches(self._source.digest(sampled), await self._source.batches(sampled))

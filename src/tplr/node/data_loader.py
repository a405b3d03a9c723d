"""Loads batches by uid and window, and prefetches the next window's."""

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
        digest: identifies them in an update (see ``WindowDataSource.digest``).
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
        """The batches that ``uid`` trains on in ``window``."""
        return await self._prefetch.take((uid, window))

    def read_ahead(self, uid: int, window: int) -> None:
        """Start loading ``assigned(uid, window)``; a later call replaces it."""
        self._prefetch.start((uid, window))

    async def digest(self, uid: int, window: int) -> str:
        """Digest of ``assigned(uid, window)``; loads no batch."""
        return self._source.digest(await self._sample_assigned(uid, window))

    async def held_out(self, window: int, hotkey: str, apart_from: Iterable[int] = ()) -> WindowBatches:
        """Random batches for evaluations of ``window`` by the validator with this hotkey; unknown before its end.

        They are disjoint from those assigned to the uids ``apart_from``.

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

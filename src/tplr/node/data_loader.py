"""Batches by uid and window: what was drawn, loaded; the next window's while this one trains."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from tplr.comms import Comms
from tplr.concurrency.prefetch import Prefetch
from tplr.node.sources import WindowDataSource
from tplr.seeds import seed_window


@dataclass(frozen=True)
class WindowBatches:
    """What was drawn for a uid and a window, or at random.

    Attributes:
        digest: what an update names it by (see ``WindowDataSource.digest``).
        batches: int64 (batches, batch_size, sequence_length).
    """

    digest: str
    batches: np.ndarray


class WindowDataLoader:
    """Draws and loads, also ahead of time; what was loaded for nobody ends with the ``async with`` block."""

    def __init__(self, source: WindowDataSource[Any], comms: Comms) -> None:
        self._source = source
        self._comms = comms
        self._ahead: Prefetch[tuple[int, int], WindowBatches] = Prefetch(self._load_own, size=1)

    async def __aenter__(self) -> Self:
        await self._ahead.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._ahead.__aexit__(kind, error, trace)

    async def assigned(self, uid: int, window: int) -> WindowBatches:
        """What ``uid`` trains on in ``window``."""
        return await self._ahead.take((uid, window))

    def read_ahead(self, uid: int, window: int) -> None:
        """Start loading what ``assigned(uid, window)`` will ask for; of several only the last is kept."""
        self._ahead.start((uid, window))

    async def digest(self, uid: int, window: int) -> str:
        """Digest of what ``uid`` trains on in ``window``; loads none of it."""
        return self._source.digest(await self._draw_own(uid, window))

    async def held_out(self, window: int, hotkey: str, apart_from: Iterable[int] = ()) -> WindowBatches:
        """Control data of ``window`` of the validator with this hotkey: nobody knows them before the window has ended.

        What the uids ``apart_from`` train on is left out.

        Raises:
            DataError: there are no others.
        """
        block_hash = await self._comms.window_hash(window + 1)
        taken = [await self._draw_own(uid, window) for uid in apart_from]
        return await self._load(self._source.held_out(hotkey, block_hash, taken))

    async def _load_own(self, which: tuple[int, int]) -> WindowBatches:
        return await self._load(await self._draw_own(*which))

    async def _draw_own(self, uid: int, window: int) -> Any:
        return self._source.assigned(uid, window, await self._comms.window_hash(seed_window(window)))

    async def _load(self, sampled: Any) -> WindowBatches:
        return WindowBatches(self._source.digest(sampled), await self._source.batches(sampled))

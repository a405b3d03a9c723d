"""Batches by uid and window: which pages, loaded, cut; the next window's while this one trains."""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from tplr.comms import Comms
from tplr.data import PageDataset, pages_digest
from tplr.hparams import HParams
from tplr.seeds import PageDraw, page_draw, random_page_draw, seed_window


@dataclass(frozen=True)
class PageBatches:
    """What a list of pages holds.

    Attributes:
        digest: SHA-256 of the page list.
        batches: each (batch_size, sequence_length) token ids.
    """

    digest: str
    batches: list[np.ndarray]


class PageFeed:
    """Loads pages; owns the one task that reads ahead, and ends it on exit."""

    def __init__(self, dataset: PageDataset, comms: Comms, hparams: HParams) -> None:
        self._dataset = dataset
        self._comms = comms
        self._hparams = hparams
        self._ahead: tuple[int, int, asyncio.Task[PageBatches]] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._drop_ahead()

    async def own(self, uid: int, window: int) -> PageBatches:
        """What ``uid`` trains on in ``window``."""
        if self._ahead and self._ahead[:2] == (uid, window):
            _, _, task = self._ahead
            self._ahead = None
            return await task
        return await self._load_own(uid, window)

    async def read_ahead(self, uid: int, window: int) -> None:
        """Start loading what ``own(uid, window)`` will ask for."""
        await self._drop_ahead()
        self._ahead = (uid, window, asyncio.create_task(self._load_own(uid, window)))

    async def random(self, window: int) -> PageBatches:
        """This validator's control pages of ``window``: nobody knows them before the window has ended."""
        block_hash = await self._comms.window_hash(window + 1)
        return await self._load(random_page_draw(hotkey=self._comms.hotkey, block_hash=block_hash))

    async def _load_own(self, uid: int, window: int) -> PageBatches:
        draw = page_draw(
            self._hparams.profile,
            uid=uid,
            window=window,
            pages_per_window=self._hparams.pages_per_window,
            block_hash=await self._comms.window_hash(seed_window(window)),
        )
        return await self._load(draw)

    async def _load(self, draw: PageDraw) -> PageBatches:
        pages = await self._dataset.pages(draw, self._hparams.pages_per_window)
        batches = await self._dataset.batches(
            pages, batch_size=self._hparams.batch_size, sequence_length=self._hparams.sequence_length
        )
        return PageBatches(pages_digest(pages), batches)

    async def _drop_ahead(self) -> None:
        if self._ahead:
            task = self._ahead[2]
            self._ahead = None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

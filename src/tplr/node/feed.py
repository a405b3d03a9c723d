"""Batches by uid and window: which pages, loaded, cut; the next window's while this one trains."""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from tplr.comms import Comms
from tplr.data.page_dataset import PageDataset
from tplr.data.pages import pages_digest
from tplr.data.prefetch import Prefetch
from tplr.hparams import HParams
from tplr.seeds import PageDraw, page_draw, random_page_draw, seed_window


@dataclass(frozen=True)
class PageBatches:
    """What a list of pages holds.

    Attributes:
        digest: SHA-256 of the dataset's manifest and the page list.
        batches: int64 (batches, batch_size, sequence_length).
    """

    digest: str
    batches: np.ndarray


class PageFeed:
    """Loads pages, also ahead of time; what was loaded for nobody ends with the ``async with`` block."""

    def __init__(self, dataset: PageDataset, comms: Comms, hparams: HParams) -> None:
        self._dataset = dataset
        self._comms = comms
        self._hparams = hparams
        self._ahead: Prefetch[tuple[int, int], PageBatches] = Prefetch(self._load_own, size=1)

    async def __aenter__(self) -> Self:
        await self._ahead.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._ahead.__aexit__(kind, error, trace)

    async def own(self, uid: int, window: int) -> PageBatches:
        """What ``uid`` trains on in ``window``."""
        return await self._ahead.take((uid, window))

    def read_ahead(self, uid: int, window: int) -> None:
        """Start loading what ``own(uid, window)`` will ask for; of several only the last is kept."""
        self._ahead.start((uid, window))

    async def random(self, window: int) -> PageBatches:
        """This validator's control pages of ``window``: nobody knows them before the window has ended."""
        block_hash = await self._comms.window_hash(window + 1)
        return await self._load(random_page_draw(hotkey=self._comms.hotkey, block_hash=block_hash))

    async def _load_own(self, which: tuple[int, int]) -> PageBatches:
        uid, window = which
        draw = page_draw(
            self._hparams.profile,
            uid=uid,
            window=window,
            pages_per_window=self._hparams.pages_per_window,
            block_hash=await self._comms.window_hash(seed_window(window)),
        )
        return await self._load(draw)

    async def _load(self, draw: PageDraw) -> PageBatches:
        pages = self._dataset.pages(draw, self._hparams.pages_per_window)
        batches = await self._dataset.batches(pages, self._hparams.batch_size, self._hparams.sequence_length)
        return PageBatches(pages_digest(pages, self._dataset.manifest.sha256), batches)

"""Batches by uid and window: which pages, loaded, cut; the next window's while this one trains."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from tplr.comms import Comms
from tplr.data.page_dataset import PageDataset
from tplr.data.pages import ROWS_PER_PAGE, pages_digest
from tplr.data.prefetch import Prefetch
from tplr.errors import DataError
from tplr.hparams import HParams
from tplr.schemas import PageRef
from tplr.seeds import page_draw, random_page_draw, seed_window

# So many times the pages that are needed are drawn, as some may be taken.
SPARE = 8


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

    async def digest(self, uid: int, window: int) -> str:
        """Digest of the pages that ``uid`` trains on in ``window``; loads none of them."""
        return pages_digest(await self._own_pages(uid, window), self._dataset.manifest.sha256)

    async def random(self, window: int, hotkey: str, apart_from: Iterable[int] = ()) -> PageBatches:
        """Control pages of ``window`` of the validator with this hotkey: nobody knows them before the window has ended.

        Pages that share rows with those of the uids ``apart_from`` are left out.

        Raises:
            DataError: the dataset has no others.
        """
        block_hash = await self._comms.window_hash(window + 1)
        draw = random_page_draw(hotkey=hotkey, block_hash=block_hash)
        taken = [page for uid in apart_from for page in await self._own_pages(uid, window)]
        drawn = self._dataset.pages(draw, SPARE * self._hparams.pages_per_window)
        free = [page for page in drawn if not any(_share_rows(page, other) for other in taken)]
        if not free:
            raise DataError(
                f"all of {len(drawn)} random pages are pages of those who are measured: use a larger dataset"
            )
        return await self._load(free[: self._hparams.pages_per_window])

    async def _load_own(self, which: tuple[int, int]) -> PageBatches:
        return await self._load(await self._own_pages(*which))

    async def _own_pages(self, uid: int, window: int) -> Sequence[PageRef]:
        draw = page_draw(
            self._hparams.profile,
            uid=uid,
            window=window,
            pages_per_window=self._hparams.pages_per_window,
            block_hash=await self._comms.window_hash(seed_window(window)),
        )
        return self._dataset.pages(draw, self._hparams.pages_per_window)

    async def _load(self, pages: Sequence[PageRef]) -> PageBatches:
        batches = await self._dataset.batches(pages, self._hparams.batch_size, self._hparams.sequence_length)
        return PageBatches(pages_digest(pages, self._dataset.manifest.sha256), batches)


def _share_rows(page: PageRef, other: PageRef) -> bool:
    same = (page.config, page.split) == (other.config, other.split)
    return same and abs(page.row - other.row) < ROWS_PER_PAGE

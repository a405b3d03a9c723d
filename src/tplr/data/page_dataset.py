"""A dataset of seeded pages, from a draw to batches of tokens."""

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from tplr.data.encoding import encode_rows
from tplr.data.manifest import fetch_manifest
from tplr.data.manifest_cache import ManifestCache
from tplr.data.packing import Tokens, pack, pad
from tplr.data.pages import ROWS_PER_PAGE, next_pages
from tplr.data.reader import PageReader
from tplr.data.replicas import Replicas
from tplr.data.shards import Manifest
from tplr.schemas import PageRef
from tplr.seeds import PageDraw
from tplr.storage.base import ObjectStore


class PageDataset:
    """Draws pages, fetches their texts, makes batches of them. Make one with ``open``.

    Attributes:
        manifest: what the dataset consists of; ``manifest.sha256`` is what nodes compare.
    """

    def __init__(
        self,
        manifest: Manifest,
        reader: PageReader,
        tokenizer: Any,
        *,
        rows_per_page: int = ROWS_PER_PAGE,
        pack_samples: bool = True,
    ) -> None:
        self.manifest = manifest
        self._reader = reader
        self._tokenizer = tokenizer
        self._rows_per_page = rows_per_page
        self._pack_samples = pack_samples

    @classmethod
    async def open(
        cls,
        stores: Sequence[ObjectStore],
        subfolder: str,
        tokenizer: Any,
        *,
        rows_per_page: int = ROWS_PER_PAGE,
        pack_samples: bool = True,
        concurrency: int = 8,
        cache: ManifestCache | None = None,
    ) -> Self:
        """Fetch the manifest from one of ``stores``, which all hold the dataset and stay open meanwhile.

        Args:
            tokenizer: of ``transformers``, with an EOS token.
            pack_samples: join documents to one stream; otherwise pad each to whole sequences.
            concurrency: how many pages are read at once.
            cache: where the manifest is kept for the next time.

        Raises:
            DataError: the manifest is not well-formed.
            StoreError: it can't be had.
        """
        replicas = Replicas(stores, concurrency=concurrency)
        manifest = await fetch_manifest(replicas, subfolder, cache)
        reader = PageReader(manifest, subfolder, replicas, rows_per_page)
        return cls(manifest, reader, tokenizer, rows_per_page=rows_per_page, pack_samples=pack_samples)

    def pages(self, draw: PageDraw, n_pages: int) -> tuple[PageRef, ...]:
        """The pages of a draw. Raises DataError as ``pages.next_pages``."""
        return next_pages(
            self.manifest.configs.values(),
            offset=draw.offset,
            n_pages=n_pages,
            seed=draw.seed,
            rows_per_page=self._rows_per_page,
        )

    async def batches(self, pages: Sequence[PageRef], batch_size: int, sequence_length: int) -> Tokens:
        """All whole batches of some pages, in the pages' order, as ``(batches, batch_size, sequence_length)`` int64.

        Raises:
            DataError: there is no such page, or a file contradicts the manifest.
            StoreError: a file can't be had. No page is ever replaced by another.
        """
        documents = await self.documents(pages, sequence_length)
        if self._pack_samples:
            return await asyncio.to_thread(pack, documents, batch_size, sequence_length)
        return await asyncio.to_thread(pad, documents, batch_size, sequence_length, self._tokenizer.eos_token_id)

    async def documents(self, pages: Sequence[PageRef], max_length: int) -> list[Tokens]:
        """The tokens of each row of some pages, in order; as ``encoding.encode_rows``. Raises as ``batches``."""

        async def one(page: PageRef) -> list[Tokens]:
            texts = await self._reader.texts(page)
            return await asyncio.to_thread(encode_rows, self._tokenizer, texts, max_length)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(page)) for page in pages]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the first failure cancelled the other pages
        return [document for task in tasks for document in task.result()]

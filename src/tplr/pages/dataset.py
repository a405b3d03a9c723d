"""A dataset of seeded pages, from a draw to batches of tokens."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from tplr.concurrency.ordered_semaphore import OrderedSemaphore
from tplr.pages.documents import documents
from tplr.pages.fetch_manifest import fetch_manifest
from tplr.pages.manifest import DatasetManifest
from tplr.pages.manifest_cache import ManifestCache
from tplr.pages.packing import Tokens, batches, padded
from tplr.pages.page_draw import ROWS_PER_PAGE, next_pages
from tplr.pages.reader import PageReader
from tplr.pages.token_cache import TokenCache
from tplr.schemas import PageRef
from tplr.seeds import PageDraw, hash_parts
from tplr.storage.base import ObjectStore
from tplr.storage.replicas import Replicas
from tplr.tokenize import Encoder, encoder
from tplr.tokenize.ragged import Ids

# Each by one thread: pages that share the cores end at once, and then all wait for Python to make arrays of them.
_ENCODED_AT_ONCE = os.cpu_count() or 1


class PageDataset:
    """Draws pages, fetches their texts, makes batches of them. Make one with ``open``.

    Attributes:
        manifest: what the dataset consists of; ``manifest.sha256`` is what nodes compare.
    """

    def __init__(
        self,
        manifest: DatasetManifest,
        reader: PageReader,
        encoder: Encoder,
        eos: int,
        *,
        rows_per_page: int = ROWS_PER_PAGE,
        pack_samples: bool = True,
        token_cache: TokenCache | None = None,
    ) -> None:
        self.manifest = manifest
        self._reader = reader
        self._encoder = encoder
        self._eos = eos
        self._rows_per_page = rows_per_page
        self._pack_samples = pack_samples
        self._cache = token_cache
        self._encoding = OrderedSemaphore(_ENCODED_AT_ONCE)

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
        token_cache: TokenCache | None = None,
    ) -> Self:
        """Fetch the manifest from one of ``stores``, which all hold the dataset and stay open meanwhile.

        Args:
            tokenizer: of ``transformers``, with an EOS token.
            pack_samples: join documents to one stream; otherwise pad each to whole sequences.
            concurrency: how many pages are read at once.
            cache: where the manifest is kept for the next time.
            token_cache: where pages' tokens are kept.

        Raises:
            DataError: the manifest is not well-formed.
            StoreError: it can't be had.
        """
        replicas = Replicas(stores, concurrency=concurrency)
        manifest = await fetch_manifest(replicas, subfolder, cache)
        return cls(
            manifest,
            PageReader(manifest, subfolder, replicas, rows_per_page),
            await asyncio.to_thread(encoder, tokenizer),
            tokenizer.eos_token_id,
            rows_per_page=rows_per_page,
            pack_samples=pack_samples,
            token_cache=token_cache,
        )

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
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.stream(page, sequence_length)) for page in pages]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the first failure cancelled the other pages
        streams = [np.empty(0, np.int32), *(task.result() for task in tasks)]
        return await asyncio.to_thread(lambda: batches(np.concatenate(streams), batch_size, sequence_length))

    async def stream(self, page: PageRef, sequence_length: int) -> Ids:
        """What one page gives to the stream that is cut into sequences: its documents, each row cut to
        ``sequence_length`` tokens and ended with EOS, padded unless they are packed. Raises as ``batches``."""
        key = hash_parts(
            "tokens of a page, 1", self.manifest.sha256, *page, self._rows_per_page,
            self._encoder.fingerprint, self._eos, sequence_length,
        )  # fmt: skip
        turn = self._encoding.turn()
        tokens = await asyncio.to_thread(self._cache.get, key) if self._cache else None
        if tokens is None:
            texts = await self._reader.texts(page)
            async with self._encoding.slot(turn):
                tokens = await asyncio.to_thread(self._encode, texts, sequence_length)
            if self._cache:
                await asyncio.to_thread(self._cache.put, key, tokens)
        return tokens if self._pack_samples else await asyncio.to_thread(padded, tokens, sequence_length, self._eos)

    def _encode(self, texts: Sequence[str], max_length: int) -> Ids:
        return documents(self._encoder.encode_batch(texts, max_length, one_core=True), self._eos).ids

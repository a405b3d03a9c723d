"""Page dataset: draws seeded pages, and tokenizes them to streams and batches."""

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from tplr.concurrency.ordered_semaphore import OrderedSemaphore
from tplr.pages.manifest import DatasetManifest
from tplr.pages.manifest_cache import ManifestCache
from tplr.pages.packing import batches, packed, padded
from tplr.pages.page_draw import ROWS_PER_PAGE, next_pages
from tplr.pages.reader import PageReader
from tplr.pages.token_cache import TokenCache
from tplr.schemas import PageRef
from tplr.seeds import PageDraw, hash_parts
from tplr.storage.base import ObjectStore
from tplr.token_buffer import Tokens
from tplr.tokenize import Encoder, encoder
from tplr.tokenize.ragged import Ids


class PageDataset:
    """Draws pages, and converts them to token streams and batches.

    Args:
        encoder: encoder of the tokenizer whose EOS is ``eos``.
        pack_samples: join documents to one stream; otherwise pad each with EOS to whole sequences.
        token_cache: caches the pages' tokens.
        threads: number of pages that are tokenized at once, each by one thread. If each page used all cores, all pages
            would end together and then wait for the GIL.
    """

    def __init__(
        self,
        reader: PageReader,
        encoder: Encoder,
        eos: int,
        *,
        pack_samples: bool = True,
        token_cache: TokenCache | None = None,
        threads: int = 2,
    ) -> None:
        self._reader = reader
        self._encoder = encoder
        self._eos = eos
        self._pack_samples = pack_samples
        self._cache = token_cache
        self._encoding = OrderedSemaphore(threads)

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
        threads: int = 2,
    ) -> Self:
        """Open like ``PageReader.open``; ``tokenizer`` is a ``transformers`` tokenizer with an EOS token."""
        reader = await PageReader.open(
            stores, subfolder, rows_per_page=rows_per_page, concurrency=concurrency, cache=cache
        )
        encode = await asyncio.to_thread(encoder, tokenizer)
        return cls(
            reader,
            encode,
            tokenizer.eos_token_id,
            pack_samples=pack_samples,
            token_cache=token_cache,
            threads=threads,
        )

    @property
    def manifest(self) -> DatasetManifest:
        """The dataset's manifest; nodes compare ``manifest.sha256``."""
        return self._reader.manifest

    def pages(self, draw: PageDraw, n_pages: int) -> tuple[PageRef, ...]:
        """Return the pages of a draw. Raises as ``next_pages``."""
        return next_pages(
            self.manifest.configs.values(),
            offset=draw.offset,
            n_pages=n_pages,
            seed=draw.seed,
            rows_per_page=self._reader.rows_per_page,
        )

    async def batches(self, pages: Sequence[PageRef], batch_size: int, sequence_length: int) -> Tokens:
        """Return all whole batches of the pages, in order: int64 ``(batches, batch_size, sequence_length)``.

        Raises as ``PageReader.texts``; a failed page is never skipped or replaced.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.stream(page, sequence_length)) for page in pages]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the first failure cancelled the other pages
        streams = [np.empty(0, np.int32), *(task.result() for task in tasks)]
        stream = await asyncio.to_thread(np.concatenate, streams)
        return await asyncio.to_thread(batches, stream, batch_size, sequence_length)

    async def stream(self, page: PageRef, sequence_length: int) -> Ids:
        """Return the token stream of one page: each row is truncated to ``sequence_length`` tokens and ends with EOS;
        unpacked rows are padded to whole sequences. Raises as ``PageReader.texts``."""
        key = hash_parts(
            "tokens of a page, 1", self.manifest.sha256, *page, self._reader.rows_per_page,
            self._encoder.fingerprint, self._eos, sequence_length,
        )  # fmt: skip
        turn = self._encoding.turn()
        tokens = await asyncio.to_thread(self._cache.get, key) if self._cache else None
        if tokens is None:
            texts = await self._reader.texts(page)
            async with self._encoding.slot(turn):
                tokens = await asyncio.to_thread(self._encode, key, texts, sequence_length)
        return tokens if self._pack_samples else await asyncio.to_thread(padded, tokens, sequence_length, self._eos)

    def _encode(self, key: str, texts: Sequence[str], max_length: int) -> Ids:
        """Encode the texts, pack their tokens, and cache them."""
        tokens = packed(self._encoder.encode_batch(texts, max_length, one_core=True), self._eos)
        if self._cache:
            self._cache.put(key, tokens)
        return tokens

"""Sampled pages become batches, over a store in memory."""

import asyncio
import copy
import threading

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from tplr.errors import DataError, ObjectNotFound
from tplr.pages.dataset import PageDataset
from tplr.pages.packing import padded
from tplr.pages.token_cache import TokenCache
from tplr.seeds import PageDraw
from tplr.storage import MemoryStore

SUBFOLDER = "sub/set"
DRAW = PageDraw(offset=12, seed=5)


async def test_batches_are_the_rows_of_the_pages_in_order(library, store, tokenizer):
    dataset = await PageDataset.open([store], SUBFOLDER, tokenizer)
    pages = dataset.pages(DRAW, 3)
    batches = await dataset.batches(pages, 4, 32)
    texts = [text for page in pages for text in library.rows[page.config][page.row : page.row + 100]]
    stream = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    whole = len(stream) // (4 * 32)
    assert whole > 10
    assert batches.dtype == np.int64
    assert np.array_equal(batches, np.array(stream[: whole * 4 * 32]).reshape(whole, 4, 32))
    assert np.array_equal(batches, await dataset.batches(pages, 4, 32))


async def test_unpacked_sequences_each_begin_a_row(library, store, tokenizer):
    dataset = await PageDataset.open([store], SUBFOLDER, tokenizer, pack_samples=False)
    pages = dataset.pages(DRAW, 1)
    sequences = (await dataset.batches(pages, 5, 32)).reshape(-1, 32)
    texts = library.rows[pages[0].config][pages[0].row : pages[0].row + 100]
    assert [tokenizer.decode(row, skip_special_tokens=True) for row in sequences] == texts


async def test_pages_may_be_of_another_length(library, store, tokenizer):
    dataset = await PageDataset.open([store], SUBFOLDER, tokenizer, rows_per_page=2)
    (page,) = dataset.pages(DRAW, 1)
    texts = library.rows[page.config][page.row : page.row + 2]
    assert tokenizer.decode(await dataset.stream(page, 99)) == "".join(text + "<eos>" for text in texts)


async def test_tokens_come_from_the_cache_only_where_everything_is_equal(library, store, tokenizer, tmp_path):
    cold = await PageDataset.open([store], SUBFOLDER, tokenizer)
    page = cold.pages(DRAW, 1)[0]
    cached = await PageDataset.open([store], SUBFOLDER, tokenizer, token_cache=TokenCache(folder=tmp_path))
    first = {length: await cached.stream(page, length) for length in (5, 99)}
    for key in [key for key in library.objects if key.endswith(".parquet")]:
        await store.delete(key)
    for cache in (TokenCache(folder=tmp_path), cached._cache):
        warm = await PageDataset.open([store], SUBFOLDER, tokenizer, token_cache=cache)
        for length, tokens in first.items():
            assert np.array_equal(await warm.stream(page, length), tokens)
        unpacked = await PageDataset.open([store], SUBFOLDER, tokenizer, token_cache=cache, pack_samples=False)
        assert np.array_equal(await unpacked.stream(page, 5), padded(first[5], 5, tokenizer.eos_token_id))
    others = [
        (page, 98, tokenizer, 100),
        (page._replace(row=page.row + 1), 99, tokenizer, 100),
        (page, 99, tokenizer, 99),
        (page, 99, with_bos(tokenizer), 100),
    ]
    for other, length, by, rows in others:
        asked = await PageDataset.open([store], SUBFOLDER, by, token_cache=cache, rows_per_page=rows)
        with pytest.raises(ObjectNotFound):
            await asked.stream(other, length)
    library.address = "group-average"  # other rows under the same page name
    await store.put(f"{SUBFOLDER}/_metadata.yaml", b"configs: [{config_name: even}, {config_name: ragged}]")
    with pytest.raises(ObjectNotFound):
        await (await PageDataset.open([store], SUBFOLDER, tokenizer, token_cache=cache)).stream(page, 99)


def with_bos(tokenizer):
    other = copy.deepcopy(tokenizer)
    special = [("<eos>", tokenizer.eos_token_id)]
    other.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=special)
    return other


@pytest.mark.parametrize("threads", [1, 3])
async def test_so_many_pages_are_tokenized_at_once(library, store, tokenizer, monkeypatch, threads):
    dataset = await PageDataset.open([store], SUBFOLDER, tokenizer, threads=threads)
    running, most, together, encode = 0, 0, threading.Barrier(threads), PageDataset._encode

    def counted(self, *arguments):
        nonlocal running, most
        running += 1
        most = max(most, running)
        together.wait(10)
        running -= 1
        return encode(self, *arguments)

    monkeypatch.setattr(PageDataset, "_encode", counted)
    await dataset.batches(dataset.pages(DRAW, 6), 4, 32)
    assert most == threads


async def test_no_pages_are_no_batches(store, tokenizer):
    dataset = await PageDataset.open([store], SUBFOLDER, tokenizer)
    assert (await dataset.batches([], 4, 32)).shape == (0, 4, 32)


async def test_a_failing_page_ends_the_others_and_is_raised_itself(library, store, tokenizer):
    dataset = await PageDataset.open([store], SUBFOLDER, tokenizer)
    page = dataset.pages(DRAW, 1)[0]
    with pytest.raises(DataError, match="Could not find shard for page 999999"):
        await dataset.batches([page, page._replace(row=999_999)], 4, 32)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_replica_with_another_bucket_name_serves_as_well(library, store, tokenizer):
    mirror = MemoryStore("mirror")
    await library.put_into(mirror)
    await store.delete(f"{SUBFOLDER}/even/0.parquet")
    await store.delete(f"{SUBFOLDER}/_metadata.yaml")
    dataset = await PageDataset.open([store, mirror], SUBFOLDER, tokenizer)
    assert len(await dataset.batches(dataset.pages(DRAW, 6), 4, 32))


async def test_a_missing_dataset_is_named(tokenizer):
    with pytest.raises(ObjectNotFound, match=r"sub/set/_metadata\.yaml"):
        await PageDataset.open([MemoryStore("empty")], SUBFOLDER, tokenizer)

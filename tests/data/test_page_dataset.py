"""From a draw to batches, over a store in memory."""

import asyncio

import numpy as np
import pytest

from tplr.data.page_dataset import PageDataset
from tplr.errors import DataError, ObjectNotFound
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
    assert len(await dataset.documents([page], 99)) == 2


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

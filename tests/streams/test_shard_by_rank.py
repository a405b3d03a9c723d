"""Shares of ranks and workers: nothing twice, nothing lost, through any change of their number."""

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tplr.data import (
    CheckpointableDataset,
    Order,
    concat_datasets,
)
from tplr.streams.testing import check_worlds

SIZES = (3, 0, 5, 1, 7, 2, 4, 6, 9)
ITEMS = [{"id": number, "input_ids": [number] * (1 + number % 3)} for number in range(sum(SIZES))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Nine JSONL files, and one parquet file of 12 row groups, with the same items."""
    folder = tmp_path_factory.mktemp("shares")
    items = iter(ITEMS)
    for number, size in enumerate(SIZES):
        lines = (json.dumps(item) + "\n" for item in islice(items, size))
        (folder / f"{number}.jsonl").write_text("".join(lines))
    pq.write_table(pa.Table.from_pylist(ITEMS), folder / "one.parquet", row_group_size=len(ITEMS) // 12 + 1)
    return folder


def same_item(sample: Any) -> Any:
    return sample


def tokens_at_most(tokens: list[int], limit: list[int]) -> bool:
    return not Counter(tokens) - Counter(limit)


def sources(folder: Path) -> dict[str, CheckpointableDataset]:
    return {
        "sequence": CheckpointableDataset.from_sequence(ITEMS, shuffle=True),
        "order": CheckpointableDataset.from_order(Order.of(ITEMS).permute(3)),
        "files": CheckpointableDataset.from_files(f"{folder}/*.jsonl", shuffle_shards=True, n_active_shards=2),
        "row groups": CheckpointableDataset.from_files(f"{folder}/*.parquet"),
        "concat": concat_datasets(
            [
                CheckpointableDataset.from_sequence(ITEMS[:20]),
                CheckpointableDataset.from_sequence(ITEMS[20:30]).shuffle(3),
                CheckpointableDataset.from_sequence(ITEMS[30:]),
            ]
        ),
    }


STAGES = {
    "none": lambda dataset: dataset,
    "shuffle": lambda dataset: dataset.shuffle(4, 1),
    "map and batch": lambda dataset: dataset.map(dict).batch(2, list),
    "parallel_map": lambda dataset: dataset.parallel_map(same_item, 2, 3, ordered=False),
    "filter and shuffle twice": lambda dataset: dataset.filter(bool).shuffle(3).parallel_map(same_item, 1).shuffle(2),
    "chunk": lambda dataset: dataset.chunk(2, drop_remainder=False).shuffle(3),
    "concat_chunk": lambda dataset: dataset.shuffle(3).concat_chunk(4).batch(2),
    "pack_chunk": lambda dataset: dataset.pack_chunk(5).shuffle(2),
    "pad": lambda dataset: dataset.pack_chunk(5).pad({"input_ids": -1}, 5).batch(2),
}  # fmt: skip


def tokens_of(samples: list[Any]) -> list[int]:
    """All tokens, without padding, whatever the samples are."""
    found: list[int] = []
    for sample in samples:
        if isinstance(sample, list):
            found += tokens_of(sample)
        else:
            found += torch.as_tensor(sample["input_ids"]).reshape(-1).tolist()
    return sorted(token for token in found if token >= 0)


ALL_TOKENS = sorted(token for item in ITEMS for token in item["input_ids"])


@pytest.mark.parametrize("name", ["sequence", "order", "files", "row groups", "concat"])
@pytest.mark.parametrize("old", range(1, 6))
@pytest.mark.parametrize("new", range(1, 6))
def test_each_sample_once_when_the_ranks_change(folder, name, old, new):
    rng = random.Random(7 * old + new)
    found, _ = check_worlds(sources(folder)[name].shard_by_rank, [old, new], lambda: rng.randint(0, 9))
    assert tokens_of(found) == ALL_TOKENS


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(["sequence", "files", "row groups", "concat"]),
    stage=st.sampled_from(sorted(STAGES)),
    worlds=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    rng=st.randoms(use_true_random=False),
)
def test_buffers_of_all_stages_are_carried(folder, name, stage, worlds, rng):
    def shared(rank: int, world: int) -> CheckpointableDataset:
        return STAGES[stage](sources(folder)[name].shard_by_rank(rank, world))

    found, counts = check_worlds(shared, worlds, lambda: rng.randint(0, 6))
    tokens = tokens_of(found)
    if stage == "concat_chunk":  # the tail of each rank of the last world is dropped, and counted
        assert len(tokens) + counts.get("dropped_tokens", 0) == len(ALL_TOKENS)
        assert tokens_at_most(tokens, ALL_TOKENS)
    else:
        assert tokens == ALL_TOKENS

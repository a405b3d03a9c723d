"""Shares of ranks and workers: no sample twice or lost, through any change of their number."""

import copy
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
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tplr.data import (
    CheckpointableDataset,
    Order,
    concat_datasets,
    find_states,
    interleave_datasets,
    load_state,
    save_state,
)
from tplr.errors import ConfigError, StateError
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
        "nested concat": concat_datasets(  # a rank may be past both datasets while another one reads the first
            [
                CheckpointableDataset.from_sequence(ITEMS[:6]) + CheckpointableDataset.from_sequence(ITEMS[6:14]),
                CheckpointableDataset.from_sequence(ITEMS[14:]),
            ]
        ),
        "interleave": interleave_datasets(
            [CheckpointableDataset.from_sequence(ITEMS[:12]), CheckpointableDataset.from_sequence(ITEMS[12:])],
            [2, 1],
            stopping_strategy="all_exhausted_without_replacement",
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
    "pack_chunk with ids": lambda dataset: dataset.pack_chunk(5, document_ids=True),
    "pad": lambda dataset: dataset.pack_chunk(5).pad({"input_ids": -1}, 5).batch(2),
}  # fmt: skip


def tokens_of(samples: list[Any]) -> list[int]:
    """Return all tokens without padding, for any kind of sample."""
    found: list[int] = []
    for sample in samples:
        if isinstance(sample, list):
            found += tokens_of(sample)
        else:
            found += torch.as_tensor(sample["input_ids"]).reshape(-1).tolist()
    return sorted(token for token in found if token >= 0)


ALL_TOKENS = sorted(token for item in ITEMS for token in item["input_ids"])


@pytest.mark.parametrize("name", ["sequence", "order", "files", "row groups", "concat", "nested concat", "interleave"])
@pytest.mark.parametrize("old", range(1, 6))
@pytest.mark.parametrize("new", range(1, 6))
def test_each_sample_once_when_the_ranks_change(folder, name, old, new):
    rng = random.Random(7 * old + new)
    found, _ = check_worlds(sources(folder)[name].shard_by_rank, [old, new], lambda: rng.randint(0, 9))
    assert tokens_of(found) == ALL_TOKENS


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["sequence", "files", "row groups", "concat", "nested concat", "interleave"]),
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


def test_endless_epochs_resume_on_other_ranks_with_each_file_once_in_each_epoch(folder):
    dataset = CheckpointableDataset.from_files(f"{folder}/*.jsonl", repeat=True, shuffle_shards=True, n_active_shards=2)
    rng, tokens, states = random.Random(3), Counter(), None
    for world in (4, 5, 1, 3, 2):
        after = []
        for rank in range(world):
            with dataset.shard_by_rank(rank, world).iter(state_dict=states) as samples:
                tokens.update(tokens_of([*islice(samples, rng.randint(0, 30))]))
                after.append(samples.state_dict())
        states = after
    with dataset.shard_by_rank(0, 1).iter(state_dict=states) as samples:
        last = samples.report()["epoch"] + 1
        for sample in samples:  # to the end of the last epoch that any rank had begun
            if samples.report()["epoch"] > last:
                break
            tokens.update(tokens_of([sample]))
    once = Counter(ALL_TOKENS)
    assert tokens == Counter({token: once[token] * (last + 1) for token in once})


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_no_rank_of_endless_epochs_ends_while_it_has_a_record_to_read(tmp_path, shuffle, seed):
    """Few small files, some of them empty: after a change, a rank may have none left of several epochs."""
    rng = random.Random(seed)
    sizes = [rng.randrange(6) for _ in range(rng.randrange(4, 9))] + [1]
    for number, size in enumerate(sizes):
        lines = (json.dumps({"id": f"{number}.{i}"}) + "\n" for i in range(size))
        (tmp_path / f"{number}.jsonl").write_text("".join(lines))
    dataset = CheckpointableDataset.from_files(
        f"{tmp_path}/*.jsonl", repeat=True, shuffle_shards=shuffle, n_active_shards=rng.randrange(1, 4)
    )
    seen, states = Counter(), None
    for world in [rng.randrange(1, 5) for _ in range(3)]:
        after = []
        for rank in range(world):
            with dataset.shard_by_rank(rank, world).iter(state_dict=states) as samples:
                wanted = rng.choice([0, 1, 5, 20, 60])
                found = [sample["id"] for sample in islice(samples, wanted)]
                assert len(found) == wanted or not (shuffle or any(sizes[rank::world]))
                seen.update(found)
                after.append(samples.state_dict())
        states = after
    with dataset.shard_by_rank(0, 1).iter(state_dict=states) as samples:
        for sample in islice(samples, 5000):
            seen[sample["id"]] += 1
            if len(seen) == sum(sizes) and len(set(seen.values())) == 1:
                break
    assert len(set(seen.values())) == 1


def test_a_rank_reads_only_its_own_files(folder):
    for rank in range(3):
        own = {3 * i + rank for i in range(3)}
        copied = CheckpointableDataset.from_files([f"{folder if i in own else '/gone'}/{i}.jsonl" for i in range(9)])
        assert tokens_of(list(copied.shard_by_rank(rank, 3)))
        with pytest.raises(FileNotFoundError):
            list(copied.shard_by_rank((rank + 1) % 3, 3))


def test_rank_and_world_size_are_read_from_the_environment_unless_given(monkeypatch):
    items = CheckpointableDataset.from_sequence([{"id": i} for i in range(6)]).shard_by_rank
    ids = lambda dataset: [sample["id"] for sample in dataset]  # noqa: E731
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    shared = items()
    assert ids(shared) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="RANK is ''"):
        ids(shared)
    monkeypatch.setenv("RANK", "1")
    assert ids(shared) == [1, 4]
    assert ids(items(rank=0)) == [0, 3]
    assert ids(items(1, 2)) == [1, 3, 5]
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ValueError, match="got 3 and 3"):
        ids(shared)


def test_what_cannot_be_shared_is_refused(folder):
    make = CheckpointableDataset
    files = make.from_files(f"{folder}/{{0..2}}.jsonl")
    with pytest.raises(ValueError, match="expected 0 <= rank < world_size, got 2 and 2"):
        files.shard_by_rank(2, 2)
    with pytest.raises(ValueError, match="3 files can't be shared by 4 ranks × workers"):
        files.shard_by_rank(0, 4).iter()
    with pytest.raises(ValueError, match=r"from_iterable\(\) can't be divided"):
        make.from_iterable(ITEMS).map(dict).shard_by_rank()
    with pytest.raises(ValueError, match="can't be divided"):
        make.from_order(Order.of(ITEMS).share(0, 2)).shard_by_rank()
    with pytest.raises(ValueError, match="already shared between ranks"):
        files.shard_by_rank().shuffle(3).shard_by_rank()
    with pytest.raises(ValueError, match="joins datasets of different shares"):
        (files.shard_by_rank() + files).iter()
    assert len(list(interleave_datasets([files.shard_by_rank(0, 2), files.shard_by_rank(0, 2)]))) > 3


def test_states_of_other_ranks_are_refused_with_what_is_needed(folder, tmp_path):
    dataset = CheckpointableDataset.from_files(f"{folder}/*.jsonl").shard_by_rank
    states = []
    for rank in range(3):
        with dataset(rank, 3).iter() as samples:
            next(samples)
            states.append(samples.state_dict())
        save_state(tmp_path / f"{rank}", states[-1])
    for wrong in (states[0], states[:2], [*states, states[0]], []):
        with pytest.raises(StateError, match=r"this is share 1 of 2 .* the states of all former shares"):
            dataset(1, 2).iter(state_dict=wrong)
    with pytest.raises(StateError, match="the state is of share 0 of 3"):
        dataset(1, 3).iter(state_dict=states[0])
    loaded = [load_state(tmp_path / f"{rank}") for rank in range(3)]
    assert tokens_of([*dataset(0, 2).resume(loaded), *dataset(1, 2).resume(loaded)]) == tokens_of(
        [sample for rank in range(3) for sample in dataset(rank, 3).iter(state_dict=states[rank])]
    )


def test_what_belongs_to_one_rank_is_divided_only_if_all_have_it_equal():
    numbered = CheckpointableDataset.from_sequence(ITEMS).shard_by_rank
    for stage, refused in (("take", "take: taken differs"), ("enumerate", "enumerate.*: count differs")):
        states = []
        for rank in range(2):
            with getattr(numbered(rank, 2), stage)(*([30] if stage == "take" else [])).iter() as samples:
                list(islice(samples, 4))
                states.append(samples.state_dict())
        dataset = getattr(numbered(0, 1), stage)(*([30] if stage == "take" else []))
        assert len(list(dataset.iter(state_dict=states))) == (26 if stage == "take" else 29)
        states[0]["position"]["taken" if stage == "take" else "count"] = 5
        with pytest.raises(StateError, match=refused):
            dataset.iter(state_dict=states)
    with numbered(0, 1).cache().iter() as samples:
        states = [samples.state_dict()]
    with pytest.raises(StateError, match="cache holds something of one rank"):
        numbered(0, 2).cache().iter(state_dict=states)


@pytest.mark.parametrize(
    ("stage", "key", "left"),
    [(lambda d: d.take(9), "taken", (1 + 9, 8)), (lambda d: d.enumerate(), "count", (1 + 20, 18))],
    ids=["take", "enumerate"],
)
def test_a_rank_that_has_not_begun_a_later_dataset_has_counted_none_of_it(stage, key, left):
    later = stage(CheckpointableDataset.from_sequence(ITEMS[8:28]))
    joined = (CheckpointableDataset.from_sequence(ITEMS[:8]) + later).shard_by_rank

    def states_after(*taken):
        states = []
        for rank, count in enumerate(taken):
            with joined(rank, 2).iter() as samples:
                assert len(list(islice(samples, count))) == count
                states.append(samples.state_dict())
        return states

    for taken, expected in zip(((4, 3), (5, 5)), left, strict=True):
        assert len(list(joined(0, 1).iter(state_dict=states_after(*taken)))) == expected
    with pytest.raises(StateError, match=rf"{key} differs between the ranks \(3, 0\)"):
        joined(0, 1).iter(state_dict=states_after(7, 3))


def workers_and_ranks(dataset: CheckpointableDataset, monkeypatch, taken: int) -> tuple[list[Any], list[Any]]:
    """The first batches of 2 ranks with 2 workers each, and their states."""
    found, states = [], []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2)
        found += list(islice(iter(loader), taken))
        states.append(copy.deepcopy(loader.state_dict()))
    return found, states


def test_two_ranks_with_two_workers_and_then_three_ranks(folder, monkeypatch):
    dataset = CheckpointableDataset.from_files(f"{folder}/*.jsonl", n_active_shards=2).shard_by_rank().shuffle(3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    everything = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        everything += DataLoader(dataset, batch_size=None, num_workers=2)
    assert tokens_of(everything) == ALL_TOKENS
    found, states = workers_and_ranks(dataset, monkeypatch, 5)
    same_world = list(found)
    for rank, state in enumerate(states):  # the same ranks and workers: each continues by itself
        monkeypatch.setenv("RANK", str(rank))
        loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2)
        loader.load_state_dict(state)
        same_world += loader
    assert tokens_of(same_world) == ALL_TOKENS
    former = find_states(states)
    assert len(former) == 4
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        found += DataLoader(dataset.resume(former), batch_size=None, num_workers=rank % 2)
    assert tokens_of(found) == ALL_TOKENS

"""Pipelines as values, their states, and their interfaces to other libraries."""

import copy
import json
import subprocess
import sys
import warnings
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import tplr.data
from tplr.data import CheckpointableDataset, Order, load_state, save_state
from tplr.errors import DataError, StateError

N = 20
SOURCE = CheckpointableDataset.from_sequence([{"input_ids": [i] * (i % 4)} for i in range(N)])
CHUNKS = SOURCE.shuffle(5).concat_chunk(3).batch(2)


def tokens(batches) -> list:
    return [batch["input_ids"].tolist() for batch in batches]


def test_importing_the_package_is_light_and_its_names_are_there():
    code = "import sys, tplr.data; print(sorted({'torch', 'pyarrow', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    for name in tplr.data.__all__:
        assert getattr(tplr.data, name) is not None
        assert name in dir(tplr.data)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tplr.data.nothing


def test_a_pipeline_is_a_value():
    assert isinstance(CHUNKS, IterableDataset)
    assert tokens(CHUNKS) == tokens(CHUNKS)
    assert len(list(SOURCE)) == N  # pipelines built on it have not changed it
    assert repr(SOURCE.take(2)) == f"CheckpointableDataset(from_sequence({N}) | take)"


def test_states_as_files_and_through_torch(tmp_path):
    with CHUNKS.iter() as batches:
        next(batches)
        state = batches.state_dict()
        rest = tokens(batches)
    torch.save(state, tmp_path / "torch")
    save_state(tmp_path / "ours", state)
    save_state(tmp_path / "ours", state)  # over an old one
    for loaded in (torch.load(tmp_path / "torch"), load_state(tmp_path / "ours"), copy.deepcopy(state)):
        assert tokens(CHUNKS.iter(state_dict=loaded)) == rest
    assert (tmp_path / "ours").stat().st_size < 8000  # five samples and a random generator's state


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (SOURCE.shuffle(6).concat_chunk(3).batch(2), r"transform 2 was shuffle\(5, 42\), here it is shuffle\(6, 42\)"),
        (SOURCE.shuffle(5).concat_chunk(4).batch(2), r"transform 3 was concat_chunk\(3, input_ids\)"),
        (SOURCE.shuffle(5).concat_chunk(3), "has the further transforms batch"),
        (CHUNKS.take(3), "lacks the further transforms take"),
        (
            CheckpointableDataset.from_sequence([{}]).shuffle(5).concat_chunk(3).batch(2),
            r"1 was from_sequence.20",
        ),
    ],
)
def test_a_state_of_another_pipeline_is_refused_with_the_step_that_differs(other, says):
    with CHUNKS.iter() as batches:
        state = batches.state_dict()
    with pytest.raises(StateError, match=says):
        other.iter(state_dict=state)
    with pytest.raises(StateError, match="not a state"):
        CHUNKS.iter(state_dict={"source": {}})


def test_a_batch_may_have_another_size_after_a_resume():
    with CHUNKS.iter() as batches:
        next(batches)
        state = batches.state_dict()
    rest = [row for batch in tokens(CHUNKS.iter(state_dict=state)) for row in batch]
    other = SOURCE.shuffle(5).concat_chunk(3).batch(4)
    assert [row for batch in tokens(other.iter(state_dict=state)) for row in batch] == rest


@pytest.mark.parametrize("batch_size", [None, 1])
def test_stateful_data_loader(batch_size):
    make = lambda: StatefulDataLoader(CHUNKS, batch_size=batch_size, num_workers=0)  # noqa: E731
    whole = tokens(make())
    for cut in range(len(whole) + 1):
        loader = make()
        batches = iter(loader)
        found = tokens(islice(batches, cut))
        state = loader.state_dict()
        for _ in range(2):
            again = make()
            again.load_state_dict(copy.deepcopy(state))
            assert found + tokens(again) == whole
            json.dumps(state, default=lambda tensor: tensor.tolist())


def test_a_refused_state_leaves_the_iterator_where_it_is():
    dataset = SOURCE.parallel_map(dict, 2, 2).shuffle(3)
    with dataset.iter() as samples, dataset.iter() as other:
        whole = list(SOURCE.shuffle(3))
        found, _ = [next(samples)], next(other)
        good = other.state_dict()
        for bad in ({**good, "pipeline": []}, {**good, "position": {"source": 1}}):
            with pytest.raises(StateError):
                samples.load_state_dict(bad)
        assert found + list(samples) == whole
        samples.load_state_dict(good)
        assert list(samples) == whole[1:]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SOURCE.batch(2.5), "batch: expected a whole size above 0, got 2.5"),
        (lambda: SOURCE.chunk(2.0), "chunk: expected a whole length above 0"),
        (lambda: SOURCE.pad({"input_ids": 0}, 2.0), "pad: expected a whole length above 0"),
        (lambda: SOURCE.shuffle(2.5), "shuffle: expected a whole buffer_size above 0"),
        (lambda: CheckpointableDataset.from_sequence([1], shuffle=True, shuffle_seed=None), "needs a shuffle_seed"),
        (lambda: CheckpointableDataset.from_files("a.jsonl", shuffle_shards=True, seed=None), "needs a seed"),
        (lambda: CheckpointableDataset.from_files("a{b*.jsonl"), r"a\{b\*.jsonl.*: close the brace, or write"),
    ],
)
def test_arguments_that_are_refused_at_once(make, says):
    with pytest.raises(ValueError, match=says):
        make()
    SOURCE.batch(np.int64(2)).chunk(np.int64(2))  # integers of numpy are numbers


def test_workers_of_a_data_loader_would_double_everything(monkeypatch):
    assert tokens(DataLoader(CHUNKS, batch_size=None, num_workers=0)) == tokens(CHUNKS)
    monkeypatch.setattr("tplr.streams.dataset.get_worker_info", lambda: SimpleNamespace(num_workers=2))
    with pytest.raises(RuntimeError, match="2 DataLoader workers would each return every sample"):
        CHUNKS.iter()
    monkeypatch.setattr("tplr.streams.dataset.get_worker_info", lambda: SimpleNamespace(num_workers=1))
    assert tokens(CHUNKS) == tokens(CHUNKS)


def test_orders_resume_anywhere_at_once():
    dataset = CheckpointableDataset.from_order(Order.of(range(10**9), "numbers").permute(1).share(1, 4))
    with dataset.iter() as samples:
        assert samples.report() == {"samples": 0, "retries": 0}
        state = samples.state_dict()
    state["position"]["consumed"] = 4 * 10**8 - 4
    assert next(dataset.iter(state_dict=state)) == Order.of(range(10**9)).permute(1)[4 * 10**8 - 3]
    halves = CheckpointableDataset.from_order(Order.of(range(10**9), "numbers").permute(1).share(0, 2))
    assert next(halves.iter(state_dict=state)) == Order.of(range(10**9)).permute(1)[4 * 10**8 - 4]
    with pytest.raises(StateError, match=r"was numbers.*\[1, 4\]"):
        halves.shuffle(2).iter(state_dict=dataset.shuffle(2).iter().state_dict())


def test_iterators_and_iterables():
    assert len(list(CheckpointableDataset.from_iterable(iter([1, 2]), repeat=True).take(9))) == 2  # yields them once
    once = CheckpointableDataset.from_iterable(i for i in range(3))
    assert list(once) == [0, 1, 2]
    with pytest.raises(DataError, match="was read before"):
        list(once)
    assert list(CheckpointableDataset.from_iterable([], repeat=True)) == []
    with CheckpointableDataset.from_iterable([1, 2, 3]).iter() as samples:
        list(samples)
        state = samples.state_dict()
    state["position"]["ended"] = False
    with pytest.raises(StateError, match="only 2"):
        CheckpointableDataset.from_iterable([1, 2]).iter(state_dict=state)


class Breaking:
    """A streamed dataset whose connection breaks at some items, once at each."""

    def __init__(self, *places: int) -> None:
        self.places = set(places)

    def __iter__(self):
        for i in range(6):
            if i in self.places:
                self.places.remove(i)
                raise ConnectionError(f"item {i}")
            yield i


@pytest.mark.parametrize("repeat", [False, True])
def test_an_error_of_an_iterable_does_not_end_it(repeat):
    found, states = [], []
    with CheckpointableDataset.from_iterable(Breaking(0, 2, 4), repeat=repeat).take(8).iter() as samples:
        while len(states) < 5:
            try:
                found += samples
                break
            except ConnectionError:
                states.append((len(found), samples.state_dict()))
    assert found == [*range(6), 0, 1][: 8 if repeat else 6]
    assert [number for number, _ in states] == [0, 2, 4]
    for number, state in states:
        assert list(CheckpointableDataset.from_iterable(Breaking(), repeat).take(8).iter(state)) == found[number:]
    with CheckpointableDataset.from_iterable(iter(Breaking(2)), repeat=repeat).iter() as samples:
        assert [next(samples), next(samples)] == [0, 1]
        with pytest.raises(ConnectionError):
            next(samples)
        for _ in range(2):
            with pytest.raises(DataError, match="after item 2 ended this iterator"):
                next(samples)


class Streaming:
    """The public interface of mosaicml-streaming's StreamingDataset."""

    def __init__(self) -> None:
        self.begin = 0
        self.epoch = 0

    def __iter__(self):
        start, self.begin = self.begin, 0
        yield from ({"id": 10 * self.epoch + i} for i in range(start, 5))
        self.epoch += 1

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict:
        return {"epoch": self.epoch, "sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.begin = state["epoch"], state["sample_in_epoch"]


@pytest.mark.parametrize("repeat", [False, True])
def test_an_error_of_a_streaming_dataset_does_not_end_the_epoch(repeat):
    class Broken(Streaming):
        def __iter__(self):
            yield from islice(super().__iter__(), 3)
            raise ConnectionError("sample 3")

    with CheckpointableDataset.from_mosaicml(Broken(), repeat).iter() as samples:
        assert [next(samples)["id"] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ConnectionError):
            next(samples)
        for _ in range(2):
            with pytest.raises(DataError, match="after sample 3 ended this iterator; resume from the state with a new"):
                next(samples)
        state = samples.state_dict()
    rest = CheckpointableDataset.from_mosaicml(Streaming(), repeat).iter(state)
    assert [sample["id"] for sample in islice(rest, 2)] == [3, 4]


@pytest.mark.parametrize("cut", range(13))
def test_mosaicml(cut):
    whole = [10 * epoch + i for epoch in range(3) for i in range(5)]
    dataset = CheckpointableDataset.from_mosaicml(Streaming(), repeat=True)
    with dataset.iter() as samples:
        assert [next(samples)["id"] for _ in range(cut)] == whole[:cut]
        state = samples.state_dict()
    for _ in range(2):
        with CheckpointableDataset.from_mosaicml(Streaming(), repeat=True).iter(state_dict=state) as resumed:
            assert resumed.state_dict() == state
            assert [next(resumed)["id"] for _ in range(15 - cut)] == whole[cut:]
    with pytest.raises(StateError, match="iterated over before"):
        dataset.iter(state_dict=state)


def test_mosaicml_once():
    dataset = CheckpointableDataset.from_mosaicml(Streaming())
    assert len(list(dataset)) == 5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(dataset)
    assert "one iterator at a time" in str(caught[0].message)
    with pytest.raises(ValueError, match="list lacks"):
        CheckpointableDataset.from_mosaicml([])

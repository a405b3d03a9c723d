"""stride, shuffle, take, enumerate, batch, cache, interleave: cases beyond the table of all steps."""

import time
from itertools import count, islice

import pytest
import torch
from torch.utils.data import DataLoader

from tplr.data import CheckpointableDataset, concat_datasets, interleave_datasets
from tplr.errors import DataError, StateError, StoreUnavailable
from tplr.streams.sources.files import FromFiles
from tplr.streams.testing import check_resume
from tplr.streams.transforms.shuffle import Shuffle

sequence = CheckpointableDataset.from_sequence
N = 48
SOURCE = sequence([{"id": i} for i in range(N)])


def ids(samples) -> list[int]:
    return [sample["id"] for sample in samples]


def bump(sample):
    sample["id"] += 100
    return sample


IN_PLACE = {
    "map": (lambda d: d.map(bump), range(100, 112)),
    "filter": (lambda d: d.filter(lambda sample: bump(sample)["id"] < 106), range(6)),
    "filter_map": (lambda d: d.filter_map(lambda sample: bump(sample) if sample["id"] < 6 else None), range(100, 106)),
    "batch": (lambda d: d.batch(1, lambda samples: bump(samples[0])), range(100, 112)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_function_that_changes_its_sample_is_applied_once(name):
    """In each epoch of a list, and after a resume from a state that holds the sample."""
    step, expected = IN_PLACE[name]
    records = sequence([{"id": i} for i in range(12)])
    for _ in range(2):
        assert ids(step(records)) == [*expected]
    found = check_resume(step(records.map(dict).shuffle(6)).parallel_map(dict, 1))
    assert sorted(ids(found)) == [*expected]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_one_state_serves_every_rank_of_every_world_that_divides_what_was_consumed(world, steps):
    double = lambda sample: {"id": sample["id"]}  # noqa: E731
    states, seen = [], []
    for rank in range(world):
        with SOURCE.stride(world, rank).map(double).iter() as samples:
            seen += [next(samples)["id"] for _ in range(steps)]
            states.append(samples.state_dict())
    assert sorted(seen) == list(range(steps * world))
    for other in (1, 2, 3, 4, 5, 6, 8, 12):
        ranks = [SOURCE.stride(other, rank).map(double) for rank in range(other)]
        if steps * world % other:
            with pytest.raises(StateError, match=f"divided among {other} ranks"):
                ranks[0].iter(state_dict=states[-1])
            continue
        for state in states:
            rest = [ids(rank.iter(state_dict=state)) for rank in ranks]
            # The global order is as if the world had never changed.
            flat = [one[i] for i in range(max(map(len, rest))) for one in rest if i < len(one)]
            assert flat == list(range(steps * world, N))


def test_batches_of_strides_are_elastic_and_what_carries_a_ranks_own_is_not():
    elastic = lambda w, r: SOURCE.stride(w, r).batch(2)  # noqa: E731
    carrying = lambda w, r: SOURCE.map(lambda s: {"input_ids": [s["id"]]}).stride(w, r).concat_chunk(2)  # noqa: E731
    for make, fits in ((elastic, True), (carrying, False)):
        with make(2, 0).iter() as samples:
            next(samples)
            state = samples.state_dict()
        for world, rank in ((2, 1), (4, 3)):
            if fits:
                assert next(make(world, rank).iter(state_dict=state))["id"].tolist() == [4 + rank, 4 + rank + world]
            else:
                with pytest.raises(StateError, match=rf"was stride\(2, 0\), here it is stride\({world}, {rank}\)"):
                    make(world, rank).iter(state_dict=state)
        next(make(2, 0).iter(state_dict=state))


def test_a_stride_that_ended_unevenly_has_ended_for_all():
    with SOURCE.stride(7, 6).iter() as samples:
        assert len(list(samples)) == 6
        state = samples.state_dict()
    assert list(SOURCE.stride(5, 0).iter(state_dict=state)) == []


class Flaky(list):
    """Fails once at item 7, like a file on a network share."""

    failed = False

    def __getitem__(self, i):
        if i == 7 and not self.failed:
            self.failed = True
            raise OSError("item 7")
        return super().__getitem__(i)


AFTER_STRIDE = {
    "nothing": lambda d: d,
    "parallel_map": lambda d: d.parallel_map(dict, 1, 2),
    "tokenize": lambda d: d.tokenize(lambda text: {"input_ids": [int(text)]}),
}


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("name", AFTER_STRIDE)
def test_after_a_read_error_a_stride_returns_its_ranks_sample(name, rank, with_state):
    rows = Flaky({"id": i, "text": str(i)} for i in range(N))
    dataset = AFTER_STRIDE[name](sequence(rows).stride(3, rank))
    found = []
    with dataset.iter() as samples:
        with pytest.raises(OSError, match="item 7"):
            found.extend(samples)
        before = list(found)
        state = samples.state_dict() if with_state else None
        found.extend(samples)
    assert ids(found) == list(range(rank, N, 3))
    if state:
        assert before + list(dataset.iter(state_dict=state)) == found


def test_a_stride_state_that_skipped_samples_before_an_error_is_refused_for_their_ranks():
    strides = [sequence(Flaky({"id": i} for i in range(N))).stride(3, rank) for rank in range(3)]
    with strides[1].iter() as samples:
        with pytest.raises(OSError, match="item 7"):
            list(samples)
        state = samples.state_dict()
    assert next(strides[1].iter(state_dict=state)) == {"id": 7}
    with pytest.raises(StateError, match="does not fit rank 0: samples of ranks below 1 had been skipped"):
        strides[0].iter(state_dict=state)


def test_the_state_of_a_stride_reads_nothing():
    def refusing_one(sample):
        if sample["id"] == 1:
            raise LookupError
        return sample

    with SOURCE.map(refusing_one).stride(2, 0).iter() as samples:
        assert next(samples) == {"id": 0}
        samples.state_dict()
        with pytest.raises(LookupError):
            next(samples)


def test_a_stride_state_of_an_earlier_version_loads():
    with SOURCE.stride(3, 2).iter() as samples:
        assert ids(islice(samples, 2)) == [2, 5]
        state = samples.state_dict()
    del state["position"]["read"]  # they were saved after the samples of all ranks
    assert [next(SOURCE.stride(3, rank).iter(state_dict=state))["id"] for rank in range(3)] == [6, 7, 8]


@pytest.mark.parametrize(("interval", "offset"), [(0, 0), (-1, 0), (3, 3), (3, -1)])
def test_refused_strides(interval, offset):
    with pytest.raises(ValueError, match="stride"):
        SOURCE.stride(interval, offset)


def test_the_documented_shuffle():
    """The golden order of the documented interface."""
    assert ids(SOURCE.take(10).shuffle(4)) == [0, 3, 2, 1, 6, 7, 4, 5, 9, 8]
    assert ids(SOURCE.shuffle(1)) == list(range(N))
    assert sorted(ids(SOURCE.shuffle(1000))) == list(range(N))
    with pytest.raises(ValueError, match="shuffle"):
        SOURCE.shuffle(0)
    with sequence([{"fn": ids}] * 3).shuffle(2).iter() as samples, pytest.raises(StateError, match="fn holds function"):
        next(samples)


def test_take_asks_for_no_more_and_may_grow():
    asked = []
    source = SOURCE.map(lambda sample: asked.append(1) or sample)
    with source.take(3).iter() as samples:
        assert len(list(samples)) == 3
        assert next(samples, None) is None
        state = samples.state_dict()
    assert len(asked) == 3
    assert ids(source.take(5).iter(state_dict=state)) == [3, 4]
    with pytest.raises(ValueError, match="take"):
        SOURCE.take(-1)


def test_enumerate_leaves_the_sources_samples_alone():
    samples = [{"id": 1}]
    assert list(sequence(samples).enumerate("n")) == [{"id": 1, "n": 0}]
    assert samples == [{"id": 1}]


def test_batches():
    tokens = sequence([{"input_ids": [i, i + 1], "x": i} for i in range(5)])
    assert [batch["x"].tolist() for batch in tokens.batch(2)] == [[0, 1], [2, 3], [4]]
    # Lists are collated like in torch: by position, not as rows.
    assert [t.tolist() for t in next(iter(tokens.batch(2)))["input_ids"]] == [[0, 1], [1, 2]]
    chunks = tokens.chunk(2).pad({"input_ids": 9}, 3)
    batch = next(iter(chunks.batch(2)))["input_ids"]
    assert torch.equal(batch, torch.tensor([[0, 1, 9], [1, 2, 9]]))
    assert batch.dtype == torch.long
    with tokens.batch(2, drop_last=True).iter() as batches:
        assert len(list(batches)) == 2
        assert batches.report() == {"samples": 2, "retries": 0, "dropped_samples": 1}
    with pytest.raises(ValueError, match="batch"):
        tokens.batch(0)


def test_a_batch_that_an_error_interrupts_is_not_lost():
    broken = iter([3])

    def once(sample):
        if sample["id"] == 5 and next(broken, None):
            raise LookupError
        return sample

    with SOURCE.map(once).batch(4, ids).iter() as batches:
        assert next(batches) == [0, 1, 2, 3]
        with pytest.raises(LookupError):
            next(batches)
        state = batches.state_dict()
        assert next(batches) == [4, 6, 7, 8]  # the error was sample 5's turn
    assert next(SOURCE.map(once).batch(4, ids).iter(state_dict=state)) == [4, 6, 7, 8]


def test_a_cache_asks_for_each_sample_once():
    asked = []
    dataset = SOURCE.map(lambda sample: asked.append(sample["id"]) or sample).cache()
    partly = dataset.iter()
    assert ids(next(partly) for _ in range(3)) == [0, 1, 2]
    state = partly.state_dict()
    assert ids(dataset) == list(range(N))
    assert ids(dataset) == list(range(N))
    assert len(asked) == N + 3  # the second pass read the source from its beginning
    assert ids(dataset.iter(state_dict=state)) == list(range(3, N))
    assert len(asked) == N + 3
    next(iter(dataset))["id"] = "changed"
    assert ids(dataset) == list(range(N))


def test_each_share_has_its_own_cache():
    dataset = SOURCE.cache()
    for _ in range(2):
        assert ids(dataset.shard_by_rank(0, 2)) == list(range(0, N, 2))
        assert ids(dataset.shard_by_rank(1, 2)) == list(range(1, N, 2))
        assert ids(dataset) == list(range(N))
    loader = DataLoader(dataset.shard_by_rank(0, 1), batch_size=None, num_workers=2)
    assert sorted(ids(loader)) == list(range(N))


def test_a_cache_over_samples_without_a_fixed_order_replays_only_a_complete_pass():
    turns = count()
    last_first = lambda sample: time.sleep(0.05 if next(turns) % 4 == 0 else 0) or sample  # noqa: E731
    dataset = SOURCE.parallel_map(last_first, 4, 1, ordered=False).cache()
    partly = dataset.iter()
    begun = ids(islice(partly, 7))
    state = partly.state_dict()
    whole = ids(dataset)
    assert sorted(whole) == list(range(N))
    assert sorted(begun + ids(partly)) == list(range(N))
    assert sorted(begun + ids(dataset.iter(state_dict=state))) == list(range(N))
    replay = dataset.iter()
    assert ids(islice(replay, 7)) == whole[:7]
    with pytest.raises(StateError, match="later pass over samples without a fixed order"):
        dataset.iter(state_dict=replay.state_dict())
    assert ids(replay) == whole[7:]


@pytest.mark.parametrize("weights", [None, [3, 1], [0.2, 0.8], [1, 0]])
def test_interleaved_shares(weights):
    a, b = (sequence([{"id": name}] * 500) for name in "ab")
    found = ids(interleave_datasets([a, b], weights))
    share = (weights or [1, 1])[0] / sum(weights or [1, 1])
    for length in range(1, len(found) + 1):
        assert abs(found[:length].count("a") - share * length) <= 0.5 + 1e-9
    assert max(found.count("a"), found.count("b")) == 500


def test_when_interleaving_ends():
    a, b, c = (sequence([{"id": f"{name}{i}"} for i in range(n)]) for name, n in (("a", 4), ("b", 1), ("c", 2)))
    order = lambda strategy, weights=None: " ".join(  # noqa: E731
        ids(interleave_datasets([a, b, c], weights, stopping_strategy=strategy)))  # fmt: skip
    assert order("first_exhausted") == "a0 b0 c0 a1"
    assert order("all_exhausted") == "a0 b0 c0 a1 b0 c1 a2 b0 c0 a3 b0 c1"
    assert order("all_exhausted_without_replacement") == "a0 b0 c0 a1 a2 c1 a3"
    # A source of weight 0 has no turn, so its end is not waited for.
    assert order("all_exhausted", [1, 0, 1]) == "a0 c0 a1 c1 a2 c0 a3 c1"
    assert order("all_exhausted_without_replacement", [0, 0, 1]) == "c0 c1"


def test_what_is_repeated_has_samples_and_its_counts_stay():
    tokens = sequence([{"input_ids": [1, 2, 3]}])
    other = sequence([{"input_ids": [9]}] * 4)
    chunks = [tokens.concat_chunk(2), other]
    with interleave_datasets(chunks, stopping_strategy="all_exhausted").iter() as samples:
        assert len(list(islice(samples, 4))) == 4
        state = samples.state_dict()
        assert len(list(samples)) == 5
        assert samples.report()["dropped_tokens"] == 4
    with interleave_datasets(chunks, stopping_strategy="all_exhausted").iter(state_dict=state) as samples:
        assert len(list(samples)) == 5
        assert samples.report()["dropped_tokens"] == 4
    empty = interleave_datasets([other, tokens.take(0)], stopping_strategy="all_exhausted")
    with empty.iter() as samples:
        next(samples)
        for _ in range(2):
            with pytest.raises(DataError, match="dataset 1 is empty"):
                next(samples)


def test_refused_combinations():
    with pytest.raises(ValueError, match="expected one of first_exhausted, all_exhausted"):
        interleave_datasets([SOURCE], stopping_strategy="last")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="one weight for each"):
        interleave_datasets([SOURCE], [1, 2])
    with pytest.raises(ValueError, match="weights"):
        interleave_datasets([SOURCE, SOURCE], [0, 0])
    with pytest.raises(ValueError, match="one weight for each"):
        interleave_datasets([])
    with pytest.raises(ValueError, match="one dataset or more"):
        concat_datasets([])


def test_counts_of_sources_that_have_ended_stay():
    tokens = sequence([{"input_ids": [1, 2, 3]}])
    with (tokens.concat_chunk(2) + tokens.concat_chunk(2)).iter() as chunks:
        assert len(list(chunks)) == 2
        assert chunks.report()["dropped_tokens"] == 2


@pytest.mark.parametrize(
    ("join", "before"),
    [
        (lambda later: concat_datasets([sequence([{"id": 0}]), later, sequence([{"id": 2}])]), 1),
        (lambda later: interleave_datasets([later, SOURCE.take(2)], stopping_strategy="all_exhausted"), 2),
    ],
)
def test_a_source_that_cannot_be_opened_is_tried_again(tmp_path, monkeypatch, join, before):
    (tmp_path / "0.jsonl").write_text('{"id": 1}\n')
    joined = join(CheckpointableDataset.from_files(tmp_path / "0.jsonl"))
    expected = ids(joined)
    with joined.iter() as samples:
        assert ids(islice(samples, before)) == expected[:before]
        monkeypatch.setattr(FromFiles, "open", _unavailable)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                next(samples)
        state = samples.state_dict()
        monkeypatch.undo()
        assert ids(samples) == expected[before:]
    assert ids(joined.iter(state_dict=state)) == expected[before:]


def _unavailable(*arguments):
    raise StoreUnavailable("503")


def test_sources_that_were_opened_are_closed_if_a_later_one_cannot_be(monkeypatch):
    both = interleave_datasets([SOURCE.shuffle(4), SOURCE])
    state = both.iter().state_dict()
    state["position"]["sources"][1] = {"epoch": -1}
    closed = []
    monkeypatch.setattr(Shuffle.iterator, "close", lambda self: closed.append(self))  # noqa: PLW0108
    with pytest.raises(StateError, match="from_sequence"):
        both.iter(state_dict=state)
    assert len(closed) == 1

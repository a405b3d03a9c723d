import copy
import datetime
import json
import random
import time
from itertools import islice

import numpy as np
import pytest
import torch

from tplr.data import CheckpointableDataset, Order, concat_datasets, interleave_datasets
from tplr.errors import DataError, StateError
from tplr.streams.state import load_state, save_state, seal, unseal

LINES = ["from_sequence[3]", "shuffle(4, 42)"]
SAMPLES = {
    "plain": [None, True, 1, 2**70, -1.5, "text", [], {}],
    "tokens": list(range(-5, 40)),
    "bytes": b"\x00\xff",
    "tuple": (1, (2, [3])),
    "keys": {1: "a", "$array": "b", (1, 2): "c"},
    "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "scalar": np.float32(0.5),
    "tensor": torch.arange(4),
    "tensor of bits": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "flag": torch.tensor(True),
}


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray | torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return a == b


def test_what_is_sealed_comes_back_through_json_and_files_any_number_of_times(tmp_path):
    state = seal(SAMPLES, LINES)
    assert json.loads(json.dumps({**state, "arrays": None})) == {**state, "arrays": None}
    assert len(state["arrays"]) <= 7  # one for each dtype, not for each sample
    save_state(tmp_path / "state", state)
    before = copy.deepcopy(state)
    for _ in range(2):
        assert same(unseal(state, LINES).position, SAMPLES)
        assert same(unseal(load_state(tmp_path / "state"), LINES).position, SAMPLES)
    assert same(before, state)


def test_a_state_does_not_change_with_what_it_was_made_of():
    array = np.arange(3)
    state = seal({"a": array}, LINES)
    array[:] = 9
    position = unseal(state, LINES).position
    assert position["a"].tolist() == [0, 1, 2]
    position["a"][:] = 7
    assert unseal(state, LINES).position["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 1}, "version 1"),
        ({"format": "other"}, "not a state"),
        ({"more": 1}, "not a state"),
        (
            {"pipeline": ["from_sequence[4]", LINES[1]]},
            r"1 was from_sequence\[4\], here it is from_sequence\[3\]",
        ),
        ({"pipeline": LINES[:1]}, "lacks the further transforms shuffle"),
        ({"pipeline": [*LINES, "take(3)"]}, r"has the further transforms take\(3\)"),
        ({"fingerprint": "0"}, "damaged"),
        ({"position": {"$array": ["int64", 0, [9]]}}, "damaged"),
        ({"position": {"$what": 1}}, "damaged"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(change, says):
    with pytest.raises(StateError, match=says):
        unseal({**seal({"a": np.arange(3)}, LINES), **change}, LINES)
    with pytest.raises(StateError, match="not a state"):
        unseal({"index": 3}, LINES)


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StateError, match=r"position.buffer\[1\].fn holds object"):
        seal({"buffer": [{}, {"fn": object()}]}, LINES)
    (tmp_path / "file").write_bytes(b"other")
    with pytest.raises(StateError, match="holds no state"):
        load_state(tmp_path / "file")


def test_a_list_of_samples_is_stored_by_column_and_comes_back_as_it_was():
    rows = [
        {"ids": torch.arange(i), "list": [i, 70_000], "text": f"{i}", "array": np.arange(i, dtype=np.int32),
         "odd": (i, None)}
        for i in range(1, 20)
    ]  # fmt: skip
    mixed = [{"a": 1}, {"a": [1, 2]}, {"a": [True]}, {"b": np.arange(2)}]
    halves = [{"a": np.arange(2, dtype=np.uint8)}, {"a": np.arange(2.0)}, {"a": np.ones((2, 2), int)}, {"a": [2**80]}]
    state = seal({"rows": rows, "mixed": mixed, "halves": halves, "none": [{}, {}]}, LINES)
    assert same(unseal(state, LINES).position, {"rows": rows, "mixed": mixed, "halves": halves, "none": [{}, {}]})
    assert len(json.dumps(state["position"]["rows"])) < 1500


@pytest.mark.parametrize(("vocabulary", "size"), [(65_536, 2), (65_537, 4), (2**31, 4), (2**33, 8)])
def test_a_token_takes_two_bytes_if_its_vocabulary_is_small(vocabulary, size):
    samples = [{"input_ids": torch.full((100,), vocabulary - 1 - i)} for i in range(50)]
    state = seal(samples, LINES)
    tokens = max(array.nbytes for array in state["arrays"].values())
    assert abs(tokens - 50 * 100 * size) <= 50 * 8
    assert same(unseal(state, LINES).position, samples)


def test_a_torn_or_damaged_file_is_a_state_error(tmp_path):
    save_state(tmp_path / "whole", seal(SAMPLES, LINES))
    whole = (tmp_path / "whole").read_bytes()
    rng = random.Random(0)
    for length in [0, 1, 22, len(whole) - 1, *rng.sample(range(len(whole)), 60)]:
        (tmp_path / "torn").write_bytes(whole[:length])
        with pytest.raises(StateError, match="torn"):
            load_state(tmp_path / "torn")
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            position = unseal(load_state(tmp_path / "damaged"), LINES).position
        except StateError:
            continue
        assert same(position, SAMPLES)  # a byte without meaning, such as in a time stamp
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "nothing")


BAD = [None, -1, 10**30, 1.5, True, "x", [], {}, [[]], [None] * 4, {"$array": ["int64", 0, [9]]}, {"$tuple": []}]


def places(value, path=()):
    """The paths of all values in nested dictionaries and lists."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copied = copy.copy(value)
    copied[path[0]] = replaced(value[path[0]], path[1:], new)
    return copied


def pipelines(folder):
    items = [{"id": i, "text": "ab " * (i % 5), "input_ids": [i] * (i % 4)} for i in range(40)]
    for number in range(4):
        lines = (json.dumps(item) + "\n" for item in items[number::4])
        (folder / f"{number}.jsonl").write_text("".join(lines))
    source = CheckpointableDataset.from_sequence(items, repeat=True, shuffle=True)
    files = CheckpointableDataset.from_files(f"{folder}/*.jsonl", n_active_shards=2).shard_by_rank()
    order = CheckpointableDataset.from_order(Order.of(items).permute(1))
    return [
        source.shuffle(4).parallel_map(dict, 2, 2).take(30).enumerate(),
        files.map(dict).concat_chunk(3).shuffle(3).batch(2),
        interleave_datasets([source, order], [2, 1]).chunk(2, drop_remainder=False).stride(2, 0),
        (order + CheckpointableDataset.from_iterable(items)).cache().pack_chunk(5).pad({"input_ids": 0}, 5),
        concat_datasets([files, files]).filter(bool).shuffle(2),
        order.shard_by_rank().shuffle(5),
    ]


@pytest.mark.parametrize("number", range(6))
def test_a_damaged_position_is_a_state_error_that_names_the_transform_and_the_key(tmp_path, number):
    dataset = pipelines(tmp_path)[number]
    with dataset.iter() as samples:
        list(islice(samples, 7))
        state = samples.state_dict()
    refused = 0
    paths = [*places(state["position"])]
    for path in random.Random(number).sample(paths, min(len(paths), 60)):
        for bad in BAD:
            damaged = {**state, "position": replaced(state["position"], path, bad)}
            try:
                with dataset.iter(state_dict=damaged) as resumed:
                    list(islice(resumed, 20))
            except StateError as error:
                refused += 1
                says = str(error)
            except DataError:  # a position in a file that is not at a record, or another version of the file
                says = "active" in path and "damaged"
            except (
                TypeError,
                KeyError,
                ValueError,
                AttributeError,
                RuntimeError,
            ):  # a damaged sample, which its readers refuse
                says = {"buffer", "samples", "carried"} & {*path} and "damaged"
            else:
                continue
            assert says, (path, bad)
            assert "damaged" in says or "from_files: " in says or "divided among" in says, (path, bad, says)
    assert refused > 50
    with pytest.raises(StateError, match="position: expected a dictionary, got None"):
        dataset.iter(state_dict={**state, "position": None})


def test_a_damaged_epoch_of_a_shuffled_source_is_refused_before_its_shuffles(tmp_path):
    for number in range(100):
        (tmp_path / f"{number}.jsonl").write_text('{"id": 1}\n')
    sequence = CheckpointableDataset.from_sequence(range(10_000), repeat=True, shuffle=True)
    files = CheckpointableDataset.from_files(f"{tmp_path}/*.jsonl", repeat=True, shuffle_shards=True)
    for dataset, path in ((sequence, ("epoch",)), (files, ("places", "epoch"))):
        with dataset.iter() as samples:
            next(samples)
            alone = samples.state_dict()
        ranks = [dataset.shard_by_rank(rank, 2).iter() for rank in range(2)]
        for rank in ranks:
            next(rank)
        with dataset.shard_by_rank(0, 3).iter(state_dict=[rank.state_dict() for rank in ranks]) as samples:
            next(samples)
            divided = samples.state_dict()
        for given, state in ((dataset, alone), (dataset.shard_by_rank(0, 3), divided)):
            assert next(given.iter(state_dict=state)) is not None
            began = time.process_time()
            with pytest.raises(StateError, match="is damaged: check: expected "):
                given.iter(state_dict={**state, "position": replaced(state["position"], path, 2**30)})
            assert time.process_time() - began < 1


def test_the_message_names_the_transform_and_the_key():
    dataset = CheckpointableDataset.from_sequence([{}] * 9).shuffle(3).take(4)
    with dataset.iter() as samples:
        next(samples)
        state = samples.state_dict()
    for path, says in (
        (("taken",), "the state of take is damaged: taken: expected a whole number of 0 or more, got 'x'"),
        (("source", "buffer"), r"the state of shuffle\(3, 42\) is damaged: buffer: expected a list, got 'x'"),
        (("source", "source", "next"), r"the state of from_sequence\(9\) is damaged: next: expected a whole number"),
    ):
        with pytest.raises(StateError, match=says):
            dataset.iter(state_dict={**state, "position": replaced(state["position"], path, "x")})
    source = {name: value for name, value in state["position"]["source"].items() if name != "random"}
    without_random = {**state["position"], "source": source}
    with pytest.raises(StateError, match=r"the state of shuffle\(3, 42\) is damaged: it lacks 'random'"):
        dataset.iter(state_dict={**state, "position": without_random})


@pytest.mark.parametrize("value", [datetime.datetime(2026, 1, 1), {1, 2}, object(), np.array([object()])])
@pytest.mark.parametrize("inside", ["itself", "list", "dictionary"])
def test_a_later_sample_that_a_state_cannot_store_is_refused_itself(value, inside):
    held = {"itself": value, "list": ["x", [value]], "dictionary": {"when": value}}[inside]
    samples = [{"id": number} for number in range(30)]
    samples[17] = {"id": 17, "at": held}
    dataset = CheckpointableDataset.from_sequence(samples).shuffle(20)
    with dataset.iter() as shuffled:
        with pytest.raises(StateError, match=r"shuffle: the sample\.at.* holds "):
            next(shuffled)
        state = shuffled.state_dict()
        rest = [sample["id"] for sample in shuffled]
    assert sorted(rest) == [number for number in range(30) if number != 17]
    assert [sample["id"] for sample in dataset.iter(state_dict=state)] == rest


def test_one_in_sixteen_samples_after_the_first_buffer_is_checked_and_a_state_refuses_the_others():
    samples = [{"id": 1}] * 31 + [{"id": {1, 2}}]
    refused = []
    for seed in range(200):
        with CheckpointableDataset.from_sequence(samples).shuffle(32, seed).iter() as shuffled:
            try:
                found = next(shuffled)
            except StateError as error:
                refused.append(str(error))
                continue
            if found == {"id": 1}:
                with pytest.raises(StateError, match=r"buffer.* holds set"):
                    shuffled.state_dict()
    assert 5 < len(refused) < 25
    assert set(refused) == {next(iter(refused))}
    assert refused[0].startswith("shuffle: the sample.id holds set, which a state can't store: use ")


@pytest.mark.parametrize("value", [datetime.datetime(2026, 1, 1), {1, 2}, object()])
def test_samples_that_a_state_cannot_store_are_refused_at_the_first_one(value):
    dataset = CheckpointableDataset.from_sequence([{"id": 1, "at": {"when": value}}] * 9).shuffle(3)
    says = rf"shuffle: the sample.at.when holds {type(value).__name__}"
    with dataset.iter() as samples, pytest.raises(StateError, match=says):
        next(samples)

"""Token columns: how they are recognised, and that every token is counted."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.data import CheckpointableDataset
from tplr.streams.transforms.tokens import narrowed, token_array

sequence = CheckpointableDataset.from_sequence


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ([1, 2], [1, 2]),
        ([], []),
        (None, []),
        (7, [7]),
        (np.int32(7), [7]),
        (np.arange(3, dtype=np.uint16), [0, 1, 2]),
        (torch.arange(3), [0, 1, 2]),
        (torch.arange(3).reshape(1, 3), [0, 1, 2]),
        (np.empty(0, np.int8), []),
    ],
)
def test_what_is_taken_for_tokens(value, tokens):
    array = token_array(value)
    assert array.dtype == np.int64
    assert array.tolist() == tokens


@pytest.mark.parametrize(
    "value",
    [1.0, [1.5], ["a"], "text", True, np.zeros(3), np.empty(0), torch.zeros(2), np.zeros((2, 3), int), torch.tensor(3),
     np.array(3), [[1], [2, 3]], object()],
)  # fmt: skip
def test_what_is_not(value):
    with pytest.raises(ValueError, match="expected one row of integer tokens"):
        token_array(value)


def test_columns_must_be_there_and_alike():
    with pytest.raises(KeyError, match="no column 'mask'"):
        list(sequence([{"input_ids": [1]}]).concat_chunk(2, ("input_ids", "mask")))
    with pytest.raises(ValueError, match="differ in length"):
        list(sequence([{"input_ids": [1], "mask": []}]).chunk(1, ("input_ids", "mask")))
    for wrong in ((0,), (1, ()), (1, "input_ids")):
        with pytest.raises(ValueError, match="concat_chunk"):
            sequence([]).concat_chunk(*wrong)
    with pytest.raises(ValueError, match="has no column"):
        list(sequence([{"input_ids": [1]}]).pad({"mask": 0}, 3))
    with pytest.raises(ValueError, match="4 tokens, more than 3"):
        list(sequence([{"input_ids": [1] * 4}]).pad({"input_ids": 0}, 3))


CHUNKING = {
    "chunk": lambda d, n: d.chunk(n),
    "chunk tails": lambda d, n: d.chunk(n, drop_remainder=False),
    "concat_chunk": lambda d, n: d.concat_chunk(n),
    "pack_chunk": lambda d, n: d.pack_chunk(n),
    "pack_chunk discard": lambda d, n: d.pack_chunk(n, discard_long_samples=True),
}


@pytest.mark.parametrize("name", CHUNKING)
@settings(max_examples=20)
@given(lengths=st.lists(st.integers(0, 12), max_size=20), length=st.integers(1, 8), stop=st.integers(0, 30))
def test_tokens_in_are_tokens_out_and_counted_drops_also_after_a_resume(name, lengths, length, stop):
    numbers = iter(range(1000))
    documents = [{"input_ids": [next(numbers) for _ in range(n)]} for n in lengths]
    dataset = CHUNKING[name](sequence(documents), length)
    out: list[int] = []
    with dataset.iter() as chunks:
        for _, chunk in zip(range(stop), chunks, strict=False):
            out += chunk["input_ids"].tolist()
        state = chunks.state_dict()
    with dataset.iter(state_dict=state) as chunks:
        for chunk in chunks:
            assert 0 < len(chunk["input_ids"]) <= length
            out += chunk["input_ids"].tolist()
        dropped = chunks.report().get("dropped_tokens", 0)
    assert len(out) == len(set(out))
    assert out == sorted(out)  # nothing is out of order
    assert len(out) + dropped == sum(lengths)


@pytest.mark.parametrize("name", CHUNKING)
def test_a_hundred_thousand_tiny_documents(name):
    """No recursion, and no quadratic time."""
    documents = sequence([{"input_ids": np.arange(i % 3)} for i in range(100_000)])
    with CHUNKING[name](documents, 1000 if name != "chunk" else 2).iter() as chunks:
        tokens = sum(len(chunk["input_ids"]) for chunk in chunks)
        assert tokens + chunks.report().get("dropped_tokens", 0) == 99_999


@pytest.mark.parametrize(("ids", "size"), [([], 2), ([0, 65535], 2), ([-1, 5], 4), ([65536], 4), ([2**40, -1], 8)])
def test_a_state_keeps_its_tokens_in_few_bytes(ids, size):
    with sequence([{"input_ids": ids}, {"input_ids": [1] * 9}]).concat_chunk(len(ids) + 5).iter() as chunks:
        next(chunks)
        state = chunks.state_dict()
    assert sum(array.nbytes for array in state["arrays"].values()) <= 8
    kept = narrowed({"a": np.array(ids, np.int64)})["a"]
    assert kept.astype(np.int64).tolist() == ids
    assert kept.itemsize == size


def test_chunks_are_nobody_elses_memory():
    source = [{"input_ids": torch.arange(6)}, {"input_ids": torch.arange(6)}]
    for name, chunking in CHUNKING.items():
        dataset = chunking(sequence(source), 6 if "pack" in name else 3)
        before = [chunk["input_ids"].tolist() for chunk in dataset]
        for chunk in dataset:
            chunk["input_ids"].fill_(9)
        assert [chunk["input_ids"].tolist() for chunk in dataset] == before

"""A position in a shuffle does not change while the shuffle continues, because read-ahead steps hold positions."""

from itertools import islice
from typing import Any

import pytest
import torch

from tplr.data import CheckpointableDataset, interleave_datasets
from tplr.streams.testing import check_resume
from tplr.streams.transforms.shuffle import Shuffle


def same(sample: dict[str, int]) -> dict[str, int]:
    return sample


def test_resume_below_a_step_that_reads_ahead() -> None:
    samples = [{"number": number} for number in range(30)]
    shuffled = CheckpointableDataset.from_sequence(samples).shuffle(8, 2)
    assert sorted(one["number"] for one in check_resume(shuffled.parallel_map(same, 2, 2))) == list(range(30))
    check_resume(interleave_datasets([shuffled, shuffled], [2, 1]).parallel_map(same, 2, 2))


def test_a_step_that_reads_ahead_takes_few_positions_of_a_large_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[None] = []
    iterator: Any = Shuffle.iterator
    state = iterator.state
    monkeypatch.setattr(iterator, "state", lambda self: taken.append(None) or state(self))
    shuffled = CheckpointableDataset.from_sequence([{"number": 1}], repeat=True).shuffle(20_000)
    with shuffled.parallel_map(same, 2).parallel_map(same, 2).iter() as samples:
        assert len(list(islice(samples, 5000))) == 5000
    assert len(taken) <= 20  # a position copies 25,000 values


@pytest.mark.parametrize("ordered", [True, False])
def test_resume_between_positions_and_after_several(ordered: bool) -> None:
    numbers = [{"number": number} for number in range(700)]
    dataset = CheckpointableDataset.from_sequence(numbers).shuffle(8, 2).parallel_map(same, 2, 2, ordered=ordered)
    if ordered:
        check_resume(dataset, places=(0, 7, 100, 170, 400, 690, 699, 700), limit=1000)
    for cut in (1, 160, 500):
        with dataset.iter() as samples:
            first = list(islice(samples, cut))
            state = samples.state_dict()
        found = first + list(dataset.iter(state_dict=state))
        assert sorted(one["number"] for one in found) == list(range(700))


def test_a_sample_that_failed_below_a_step_that_reads_ahead_does_not_shift_a_resume() -> None:
    """The resume reads no sample before the error again, so it does not matter whether that one fails again."""
    failing = {30}

    def fails(sample: dict[str, int]) -> dict[str, int]:
        if sample["number"] in failing:
            raise LookupError
        return sample

    source = CheckpointableDataset.from_sequence([{"number": number} for number in range(100)])
    dataset = source.map(fails).shuffle(8, 2).parallel_map(same, 2, 2)
    with dataset.iter() as samples:
        with pytest.raises(LookupError):
            list(samples)
        for _ in range(5):
            next(samples)
        state = samples.state_dict()
        rest = list(samples)
    failing.clear()
    assert list(dataset.iter(state_dict=state)) == rest


def test_tokens_come_out_as_they_went_in_when_a_later_one_needs_more_bytes() -> None:
    rows = [[7, 65_535], [1, 2], [65_536, 3], [2**31, -1], [5, 6], [2**40, 8], [9, 10]]
    documents = CheckpointableDataset.from_sequence([{"input_ids": row, "mask": [1, 1]} for row in rows])
    chunks = documents.chunk(2, ("input_ids", "mask"))
    for shuffled in (chunks.shuffle(4), chunks.shuffle(4).batch(2), chunks.shuffle(4).concat_chunk(3)):
        check_resume(shuffled)
    found = [chunk["input_ids"] for chunk in chunks.shuffle(4)]
    assert sorted(one.tolist() for one in found) == sorted(rows)
    assert {one.dtype for one in found} == {torch.int64}
    with chunks.shuffle(4).iter() as samples:
        next(samples)
        assert {name for name in samples.state_dict()["arrays"] if name != "uint32"} == {"int64", "uint16"}

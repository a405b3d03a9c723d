"""A position in a shuffle does not change while the shuffle continues, because read-ahead steps hold positions."""

import torch

from tplr.data import CheckpointableDataset, interleave_datasets
from tplr.streams.testing import check_resume


def same(sample: dict[str, int]) -> dict[str, int]:
    return sample


def test_resume_below_a_step_that_reads_ahead() -> None:
    samples = [{"number": number} for number in range(30)]
    shuffled = CheckpointableDataset.from_sequence(samples).shuffle(8, 2)
    assert sorted(one["number"] for one in check_resume(shuffled.parallel_map(same, 2, 2))) == list(range(30))
    check_resume(interleave_datasets([shuffled, shuffled], [2, 1]).parallel_map(same, 2, 2))


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

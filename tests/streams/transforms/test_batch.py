"""A position between two batches does not change while the next batch is filled."""

import pytest

from tplr.data import CheckpointableDataset, interleave_datasets
from tplr.streams.testing import check_resume


def same(batch: list[dict[str, int]]) -> list[dict[str, int]]:
    return batch


def test_resume_below_a_step_that_reads_ahead() -> None:
    batches = CheckpointableDataset.from_sequence([{"number": number} for number in range(30)]).batch(4, list)
    check_resume(batches.parallel_map(same, 2, 2))
    check_resume(interleave_datasets([batches, batches], [1, 2]).parallel_map(same, 2, 2))


class Flaky(list):
    """Fails from its element 11 on."""

    def __getitem__(self, i):
        if i >= 11:
            raise OSError("network")
        return super().__getitem__(i)


def test_a_partial_batch_resumes_with_a_smaller_size() -> None:
    with CheckpointableDataset.from_sequence(Flaky(range(24))).batch(12, list).iter() as batches:
        with pytest.raises(OSError, match="network"):
            next(batches)
        state = batches.state_dict()
    again = CheckpointableDataset.from_sequence(range(24)).batch(4, list)
    assert list(again.iter(state)) == [list(range(i, i + 4)) for i in range(0, 24, 4)]


def test_partial_batches_resume_with_fewer_ranks() -> None:
    states = []
    for rank in range(2):
        ranks = CheckpointableDataset.from_sequence(Flaky(range(24))).shard_by_rank(rank, 2).batch(8, list)
        with ranks.iter() as batches:
            with pytest.raises(OSError, match="network"):
                next(batches)
            states.append(batches.state_dict())
    again = CheckpointableDataset.from_sequence(range(24)).shard_by_rank(0, 1).batch(8, list)
    found = list(again.iter(states))
    assert [len(batch) for batch in found] == [8, 8, 8]
    assert sorted(number for batch in found for number in batch) == list(range(24))

"""A position in a shuffle stays what it was while the shuffle goes on: a step that reads ahead holds one for long."""

from tplr.data import CheckpointableDataset, interleave_datasets
from tplr.streams.testing import check_resume


def same(sample: dict[str, int]) -> dict[str, int]:
    return sample


def test_resume_below_a_step_that_reads_ahead() -> None:
    samples = [{"number": number} for number in range(30)]
    shuffled = CheckpointableDataset.from_sequence(samples).shuffle(8, 2)
    assert sorted(one["number"] for one in check_resume(shuffled.parallel_map(same, 2, 2))) == list(range(30))
    check_resume(interleave_datasets([shuffled, shuffled], [2, 1]).parallel_map(same, 2, 2))

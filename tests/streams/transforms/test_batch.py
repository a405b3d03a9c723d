"""A position between two batches stays what it was while the next batch is filled."""

from tplr.data import CheckpointableDataset, interleave_datasets
from tplr.streams.testing import check_resume


def same(batch: list[dict[str, int]]) -> list[dict[str, int]]:
    return batch


def test_resume_below_a_step_that_reads_ahead() -> None:
    batches = CheckpointableDataset.from_sequence([{"number": number} for number in range(30)]).batch(4, list)
    check_resume(batches.parallel_map(same, 2, 2))
    check_resume(interleave_datasets([batches, batches], [1, 2]).parallel_map(same, 2, 2))

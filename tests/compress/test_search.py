"""Positions, against lists written by hand."""

import torch

from tplr.compress.search import at_least, below, nonzero


def test_nonzero_gives_the_positions_of_ones():
    flags = torch.tensor([0, 1, 1, 0, 1], dtype=torch.uint8)
    assert nonzero(flags).tolist() == nonzero(flags.bool()).tolist() == [1, 2, 4]


def test_entries_below_their_rows_bound():
    rows, columns = below(
        torch.tensor([[3.0, 1.0, 0.5], [2.0, 2.0, 2.0], [0.0, 9.0, 1.0]]), torch.tensor([1.0, 2.0, 5.0])
    )
    assert (rows.tolist(), columns.tolist()) == ([0, 2, 2], [2, 0, 2])


def test_entries_at_least_their_rows_bound():
    found = at_least(torch.tensor([[3.0, 1.0, 0.5], [2.0, 2.0, 2.5]]), torch.tensor([[1.0], [2.5]]))
    assert found.tolist() == [0, 1, 5]

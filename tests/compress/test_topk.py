"""The k largest entries against a plain sort, and the largest entry of each group, with ties."""

import torch

from tplr.compress.topk import at_least, largest_of_groups, select, top_k


def by_sorting(row: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda i: (-abs(row[i]), i))[:k])


def test_indices_and_values_against_a_sort():
    # Few distinct values: nearly every row has ties at its threshold, some none.
    rows = torch.randint(-6, 7, (200, 30), generator=torch.Generator().manual_seed(2)).float()
    rows[100:] += torch.randn(100, 30, generator=torch.Generator().manual_seed(3))
    for k in (1, 7, 29, 30):
        indices, values = top_k(rows, k)
        assert indices.tolist() == [by_sorting(row, k) for row in rows.tolist()]
        assert torch.equal(values, rows.gather(1, indices))


def test_rows_of_zeros_take_the_first_entries():
    assert top_k(torch.zeros(2, 5), 3)[0].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_the_largest_of_each_group_is_its_first():
    # Groups of three: 0, 3, -3, -2; then -3, 0.5, 3; then 1, 0, 0.
    rows = torch.tensor([[0.0, -3.0, 1.0, 3.0, 0.5, 0.0, -3.0, 3.0, 0.0, -2.0]])
    indices, values = largest_of_groups(rows, 3)
    assert indices.tolist() == [[3, 1, 2]]
    assert values.tolist() == [[3.0, -3.0, 1.0]]


def test_a_row_that_is_sent_whole_has_no_groups():
    rows = torch.randn(2, 8)
    indices, values = select(rows, 8, grouped=True)
    assert indices.tolist() == [list(range(8))] * 2
    assert torch.equal(values, rows)


def test_entries_at_least_their_rows_bound():
    found = at_least(torch.tensor([[3.0, 1.0, 0.5], [2.0, 2.0, 2.5]]), torch.tensor([[1.0], [2.5]]))
    assert found.tolist() == [0, 1, 5]

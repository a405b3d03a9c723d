"""Aggregation against a plain sum: exact in its order, and no peer counts more than the cap."""

import numpy as np
import pytest
import torch

from tplr.compress import aggregate, chunks
from tplr.compress.aggregate import clip, norms, weighted_sums
from tplr.compress.chunks import ChunkGrid


def peers_of(grid: ChunkGrid, count: int, k: int = 6):
    generator = torch.Generator().manual_seed(count)
    made = []
    for _ in range(count):
        order = torch.rand(grid.chunks, grid.entries, generator=generator)
        indices = order.argsort(dim=1)[:, :k].sort(dim=1).values
        made.append(indices)
    return torch.stack(made), torch.randn(count, grid.chunks, k, generator=generator)


@pytest.mark.parametrize("entries", [2**18, 300])
def test_sums_are_those_of_a_loop_in_float64(entries, monkeypatch):
    monkeypatch.setitem(chunks.ROW_BLOCK_ENTRIES, "cpu", entries)
    grid = ChunkGrid.of((40, 30), 8)
    peers, weights = peers_of(grid, 5), [0.3, 1.7, -1.0, 0.01, 5.5]
    expected = np.zeros((grid.chunks, grid.entries))
    for indices, values, weight in zip(*peers, weights, strict=True):
        for chunk in range(grid.chunks):
            for index, value in zip(indices[chunk].tolist(), values[chunk].tolist(), strict=True):
                expected[chunk, index] += value * weight
    total = np.concatenate([part.numpy() for _, part in weighted_sums(peers, weights, grid)])
    np.testing.assert_array_equal(total, expected)


def norm_by_halves(values: np.ndarray) -> float:
    """An independent version of the order of additions: second halves of [chunks, k] are added to the first halves."""
    squares = values.astype(np.float64) ** 2
    for _ in range(2):
        while len(squares) > 1:
            half = len(squares) // 2
            squares, rest = squares[: len(squares) - half].copy(), squares[-half:]
            squares[:half] += rest
        squares = squares[0]
    return float(np.sqrt(squares))


@pytest.mark.parametrize("at_once", [2**18, 1])
def test_norms_are_added_up_in_one_order(at_once, monkeypatch):
    monkeypatch.setitem(aggregate.ENTRIES_AT_ONCE, "cpu", at_once)
    values = torch.randn(4, 2, 25, 7, generator=torch.Generator().manual_seed(3)) * torch.logspace(-9, 9, 25)[:, None]
    values[2] = 0
    found = norms(values)
    np.testing.assert_array_equal(found, [[norm_by_halves(one.numpy()) for one in peer] for peer in values])
    torch.testing.assert_close(found, values.double().flatten(2).norm(dim=2), rtol=1e-14, atol=0)
    apart = torch.empty(25, 2, 4, 7).permute(2, 1, 0, 3).copy_(values)  # the memory order of decoded values
    assert torch.equal(norms(apart), found)


@pytest.mark.parametrize(
    ("lengths", "cap", "factors"),
    [([3.0], 3.0, [1.0]), ([1.0, 2.0], 1.0, [1.0, 0.5]), ([1e6, 2.0, 0.0], 2.0, [2e-6, 1.0, 1.0])],
)
def test_who_is_longer_than_the_cap_is_clipped_to_it(lengths, cap, factors):
    assert clip(lengths, cap) == pytest.approx(factors)

"""Grids have their documented shapes, and row blocks cover a matrix once, in order."""

import pytest
import torch

from tplr.compress import chunks
from tplr.compress.chunks import ChunkGrid, largest_divisor


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((2048, 8192), (2048, 8192, 64, 64)),
        ((100, 48), (100, 48, 50, 48)),
        ((1733, 7), (1733, 7, 1, 7)),
        ((128,), (1, 128, 1, 64)),
        ((), (1, 1, 1, 1)),
        ((6, 4, 3, 5), (6, 60, 6, 60)),
    ],
)
def test_grid_of_a_shape(shape, grid):
    made = ChunkGrid.of(shape, 64)
    assert (made.rows, made.cols, made.chunk_rows, made.chunk_cols) == grid
    assert made.chunks * made.entries == made.rows * made.cols


def test_largest_divisor_against_a_plain_search():
    for number in range(1, 200):
        for limit in (1, 7, 64):
            assert largest_divisor(number, limit) == max(d for d in range(1, limit + 1) if number % d == 0)


def test_empty_tensors_are_refused():
    with pytest.raises(ValueError, match="without entries"):
        ChunkGrid.of((4, 0), 64)


def test_row_blocks_cover_everything_in_order(monkeypatch):
    monkeypatch.setitem(chunks.ROW_BLOCK_ENTRIES, "cpu", 300)
    grid = ChunkGrid.of((40, 30), 8)  # chunks of 8 x 6: row blocks of 240 entries, 5 chunks each
    row_blocks = list(grid.row_blocks())
    assert [rows for rows, _ in row_blocks] == [slice(i, i + 8) for i in range(0, 40, 8)]
    assert [which for _, which in row_blocks] == [slice(i, i + 5) for i in range(0, 25, 5)]


def test_blocks_are_a_view_of_the_chunks_that_are_cut():
    matrix = torch.arange(6.0 * 8).view(6, 8)
    grid = ChunkGrid.of(matrix.shape, 4)
    blocks = grid.blocks(matrix)
    assert torch.equal(blocks[1, 0], matrix[3:, :4])
    assert torch.equal(blocks.reshape(grid.chunks, -1), grid.cut(matrix))
    blocks.zero_()
    assert not matrix.any()

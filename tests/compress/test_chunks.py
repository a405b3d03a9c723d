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
    assert [bands for bands, _ in row_blocks] == [slice(i, i + 1) for i in range(5)]
    assert [which for _, which in row_blocks] == [slice(i, i + 5) for i in range(0, 25, 5)]


def test_blocks_are_a_view_of_the_chunks_that_are_cut():
    matrix = torch.arange(6.0 * 8).view(6, 8)
    grid = ChunkGrid.of(matrix.shape, 4)
    bands = grid.view(matrix)
    blocks = grid.blocks(bands)
    assert torch.equal(blocks[1, 0], matrix[3:, :4])
    assert torch.equal(blocks.reshape(grid.chunks, -1), grid.cut(bands))
    assert torch.equal(grid.join(grid.cut(bands)), bands)
    blocks.zero_()
    assert not matrix.any()


def test_the_rows_of_a_spread_chunk_have_equal_distances():
    matrix = torch.arange(12.0 * 8).view(12, 8)
    grid = ChunkGrid.of(matrix.shape, 4, spread=True)
    assert (grid.bands, grid.chunk_rows) == (3, 4)
    bands = grid.view(matrix)
    blocks = grid.blocks(bands)
    for band in range(3):
        for across in range(2):
            assert torch.equal(blocks[band, across], matrix[band::3, 4 * across : 4 * across + 4])
    assert torch.equal(blocks.reshape(grid.chunks, -1), grid.cut(bands))
    assert torch.equal(grid.join(grid.cut(bands)), bands)
    bands[1] += 100
    assert torch.equal((matrix >= 100).all(dim=1).nonzero().flatten(), torch.arange(1, 12, 3))
    blocks.zero_()
    assert not matrix.any()


@pytest.mark.parametrize("shape", [(7,), (3, 5), (6, 4, 3)])
def test_a_matrix_of_one_band_has_the_same_chunks_if_they_are_spread(shape):
    tensor = torch.randn(shape)
    plain, spread = ChunkGrid.of(shape, 8), ChunkGrid.of(shape, 8, spread=True)
    assert torch.equal(plain.cut(plain.view(tensor)), spread.cut(spread.view(tensor)))

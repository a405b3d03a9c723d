"""The transform against SciPy's, chunk by chunk."""

import numpy as np
import pytest
import scipy.fft
import torch

from tplr.compress.chunks import ChunkGrid
from tplr.compress.dct import basis, inverse, transform


@pytest.mark.parametrize("shape", [(12, 20), (8, 8), (35,), (6, 9, 2)])
def test_chunks_are_transformed_as_scipy_does(shape):
    grid = ChunkGrid.of(shape, 5)
    matrix = torch.randn(grid.rows, grid.cols, generator=torch.Generator().manual_seed(1))
    coefficients = transform(matrix, grid)
    assert coefficients.shape == (grid.chunks, grid.entries)
    tall, wide, number = grid.chunk_rows, grid.chunk_cols, 0
    for top in range(0, grid.rows, tall):
        for left in range(0, grid.cols, wide):
            chunk = matrix[top : top + tall, left : left + wide].double().numpy()
            expected = scipy.fft.dctn(chunk, type=2, norm="ortho").ravel()
            np.testing.assert_allclose(coefficients[number].numpy(), expected, atol=1e-12)
            number += 1
    torch.testing.assert_close(inverse(coefficients, grid), matrix.double(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_bases_are_orthogonal(size):
    matrix = basis(size, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-13, rtol=0)


def test_right_angles_are_exactly_zero():
    assert basis(3, torch.device("cpu"))[1, 1] == 0

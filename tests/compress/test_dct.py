"""The transform against SciPy's, chunk by chunk, and its data type."""

import numpy as np
import pytest
import scipy.fft
import torch

from tplr.compress.chunks import ChunkGrid
from tplr.compress.dct import basis, inverse, inverse_at, inverse_sparse, transform, working_dtype


@pytest.mark.parametrize("shape", [(12, 20), (8, 8), (35,), (6, 9, 2), (128, 192), (61, 50)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 4e-6), (torch.bfloat16, 4e-6)])
def test_chunks_are_transformed_as_scipy_does(shape, dtype, error):
    """A tensor in bfloat16 is transformed in float32: the result contains only the rounding of the input."""
    grid = ChunkGrid.of(shape, 64 if max(shape) > 60 else 5)
    matrix = torch.randn(grid.rows, grid.cols, generator=torch.Generator().manual_seed(1)).to(dtype)
    chunks = grid.cut(grid.view(matrix)).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    coefficients = transform(chunks, grid)
    assert coefficients.shape == (grid.chunks, grid.entries)
    tall, wide, number = grid.chunk_rows, grid.chunk_cols, 0
    for top in range(0, grid.rows, tall):
        for left in range(0, grid.cols, wide):
            chunk = matrix[top : top + tall, left : left + wide].double().numpy()
            expected = scipy.fft.dctn(chunk, type=2, norm="ortho").ravel()
            np.testing.assert_allclose(coefficients[number].numpy(), expected, atol=error)
            number += 1
    found = grid.join(inverse(coefficients, grid)).view(matrix.shape)
    torch.testing.assert_close(found.double(), matrix.double(), atol=error, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_agrees():
    grid = ChunkGrid.of((128, 192), 64)
    chunks = torch.randn(grid.chunks, grid.entries, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(transform(chunks.cuda(), grid).cpu(), transform(chunks, grid), atol=1e-12, rtol=0)


def test_products_are_float64_where_float32_ones_may_be_shortened():
    cpu = torch.device("cpu")
    assert working_dtype(cpu) == torch.float32
    assert working_dtype(torch.device("cuda")) == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert working_dtype(cpu) == torch.float64
    torch.set_float32_matmul_precision("high")
    try:
        assert working_dtype(cpu) == torch.float64
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("shape", "k"), [((12, 20), 3), ((12, 20), 19), ((35,), 2), ((6, 9, 2), 6)])
def test_inverse_of_few_coefficients_is_that_of_a_chunk_of_zeros_and_these(shape, k):
    grid = ChunkGrid.of(shape, 5)
    generator = torch.Generator().manual_seed(2)
    indices = torch.rand(grid.chunks, grid.entries, generator=generator).topk(k, dim=1).indices.sort(dim=1).values
    values = torch.randn(grid.chunks, k, generator=generator, dtype=torch.float64)
    dense = torch.zeros(grid.chunks, grid.entries, dtype=torch.float64).scatter(1, indices, values)
    torch.testing.assert_close(inverse_sparse(indices, values, grid), inverse(dense, grid), atol=1e-14, rtol=0)


@pytest.mark.parametrize("shape", [(12, 20), (35,)])
def test_one_entry_of_each_chunk_is_that_of_the_whole_inverse(shape):
    grid = ChunkGrid.of(shape, 5)
    generator = torch.Generator().manual_seed(3)
    indices = torch.rand(2, grid.chunks, grid.entries, generator=generator).argsort(dim=2)[..., :3]
    values = torch.randn(indices.shape, generator=generator, dtype=torch.float64)
    dense = torch.zeros(2, grid.chunks, grid.entries, dtype=torch.float64).scatter(2, indices, values).sum(dim=0)
    entries = np.arange(grid.chunks) * 7 % grid.entries
    expected = inverse(dense, grid).numpy()[np.arange(grid.chunks), entries]
    together = np.concatenate(indices.numpy(), axis=1), np.concatenate(values.numpy(), axis=1)
    np.testing.assert_allclose(inverse_at(*together, entries, grid), expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_bases_are_orthogonal(size):
    matrix = basis(size, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-13, rtol=0)


def test_right_angles_are_exactly_zero():
    assert basis(3, torch.float64, torch.device("cpu"))[1, 1] == 0

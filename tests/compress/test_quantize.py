"""Few bits are near the values, and exactly the same for everyone."""

import numpy as np
import pytest
import torch

from tplr.compress.quantize import SCALES, Quantized, dequantize, quantize


def largest_coefficients(seed: int) -> torch.Tensor:
    """Like top-k values: none near zero, a tail above, and chunks that differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(3 * torch.randn(50, 1, generator=generator))
    magnitude = size * (1 + torch.distributions.Exponential(2.0).icdf(torch.rand(50, 32, generator=generator)))
    return magnitude * torch.randn(50, 32, generator=generator).sign()


def relative_error(values: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    return (decoded - values).square().sum(1) / values.square().sum(1)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.1), (2, 0.035), (4, 0.008), (8, 8e-5)])
def test_error_shrinks_with_bits_in_every_chunk_alike(bits, error):
    values = largest_coefficients(5)
    coded = quantize(values, bits)
    assert int(coded.codes.max()) < 2**bits
    relative = relative_error(values, dequantize(coded, bits))
    assert relative.mean() < error
    assert relative.max() < 6 * error


def test_two_levels_are_nearly_the_best_two():
    values = largest_coefficients(7)
    coded = quantize(values, 2)
    magnitude = values.abs() / SCALES[coded.scales.long(), None]
    unit = magnitude.mean()
    best = min(
        torch.minimum((magnitude - low * unit).square(), (magnitude - high * unit).square()).mean().item()
        for low in np.arange(0.5, 1.2, 0.05)
        for high in np.arange(1.2, 4, 0.05)
    )
    got = dequantize(coded, 2).abs() / SCALES[coded.scales.long(), None]
    assert (magnitude - got).square().mean() < 1.03 * best


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_chunks_of_zeros_stay_zero(bits):
    values = largest_coefficients(6)
    values[3] = 0
    assert not dequantize(quantize(values, bits), bits)[3].any()
    assert not dequantize(quantize(torch.zeros(2, 4), bits), bits).any()


def test_decoding_is_one_float32_product():
    ladder = torch.tensor([0.7, 1.3])
    coded = Quantized(
        ladder, torch.tensor([255, 9], dtype=torch.uint8), torch.tensor([[0, 1], [2, 3]], dtype=torch.uint8)
    )
    low, high = np.float32(0.7), np.float32(float(ladder[0]) + float(ladder[1]))
    scale = np.float32(2.0 ** ((9 - 255) / 8))
    assert dequantize(coded, 2).tolist() == [[low, -low], [high * scale, -high * scale]]
    assert SCALES[0] == 0
    assert SCALES[255] == 1


def test_one_value_many_times_is_exact_enough():
    decoded = dequantize(quantize(torch.full((3, 8), -2.5), 4), 4)
    torch.testing.assert_close(decoded, torch.full((3, 8), -2.5))


def test_huge_and_tiny_values_stay_finite():
    values = torch.tensor([[1e30, -1e30], [1e-30, 1e-30], [3.0, -4.0]])
    for bits in (1, 2, 4, 8):
        assert dequantize(quantize(values, bits), bits).isfinite().all()

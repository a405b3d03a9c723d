"""Quantized values are near the originals, and identical on every node."""

import numpy as np
import pytest
import torch

from tplr.compress.quantize import SCALES, Quantized, Quantizer, dequantize, quantize


def coded_alone(values: torch.Tensor, quantizer: Quantizer, seed: int = 0) -> Quantized:
    (together,) = quantize([values[None]], quantizer, [[seed]])
    return Quantized(together.codebook[0], together.scales[0], together.codes[0])


def largest_coefficients(seed: int) -> torch.Tensor:
    """Return values like top-k values: none near zero, a tail above, and chunks that differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(3 * torch.randn(50, 1, generator=generator))
    magnitude = size * (1 + torch.distributions.Exponential(2.0).icdf(torch.rand(50, 32, generator=generator)))
    return magnitude * torch.randn(50, 32, generator=generator).sign()


def relative_error(values: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    return (decoded - values).square().sum(1) / values.square().sum(1)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.1), (2, 0.035), (4, 0.006), (8, 1e-4)])
def test_error_shrinks_with_bits_in_every_chunk_alike(bits, error):
    values = largest_coefficients(5)
    coded = coded_alone(values, Quantizer(bits))
    assert int(coded.codes.max()) < 2**bits
    relative = relative_error(values, dequantize(coded))
    assert relative.mean() < error
    assert relative.max() < 10 * error


def test_two_bits_are_nearly_the_best_four_levels():
    values = largest_coefficients(7)
    coded = coded_alone(values, Quantizer(2))
    relative = values / SCALES[coded.scales.long(), None]
    unit, magnitude = relative.abs().mean(), relative.abs()
    best = min(
        torch.minimum((magnitude - low * unit).square(), (magnitude - high * unit).square()).mean().item()
        for low in np.arange(0.5, 1.2, 0.05)
        for high in np.arange(1.2, 4, 0.05)
    )
    got = dequantize(coded) / SCALES[coded.scales.long(), None]
    assert (relative - got).square().mean() < 1.03 * best


def test_bin_means_are_the_documented_formula():
    """``facts``: shift = mean, width = 6 sigma / bins, code = round(x / width) + bins / 2, entry = mean of its bin."""
    values = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)) + 0.3
    coded = coded_alone(values, Quantizer(2, scale="tensor", codebook="bins"))
    x = values.double().numpy()
    bins = np.clip(np.round((x - x.mean()) / (6 * x.std() / 4)) + 2, 0, 3)
    expected = [x[bins == code].mean() for code in range(4)]
    np.testing.assert_allclose(coded.codebook.numpy(), expected, rtol=1e-6)
    assert not coded.scales.numel()
    assert dequantize(coded).unique().tolist() == coded.codebook.tolist()


def test_stochastic_rounding_is_right_on_average_and_repeats_with_its_seed():
    values = torch.linspace(-1, 1, 9).repeat(4000, 1)
    quantizer = Quantizer(1, scale="tensor", rounding="stochastic")
    decoded = [dequantize(coded_alone(values, quantizer, seed)) for seed in (1, 1, 2)]
    assert torch.equal(decoded[0], decoded[1])
    assert not torch.equal(decoded[0], decoded[2])
    low, high = decoded[0].unique().tolist()
    torch.testing.assert_close(decoded[0].mean(dim=0), values[0].clamp(low, high), atol=0.03, rtol=0)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_chunks_of_zeros_stay_zero(bits):
    values = largest_coefficients(6)
    values[3] = 0
    assert not dequantize(coded_alone(values, Quantizer(bits)))[3].any()
    assert not dequantize(coded_alone(torch.zeros(2, 4), Quantizer(bits))).any()


def test_decoding_is_one_float32_product():
    codebook = torch.tensor([-0.7, 0.1, 0.7, 1.3])
    coded = Quantized(
        codebook, torch.tensor([255, 9], dtype=torch.uint8), torch.tensor([[0, 1], [2, 3]], dtype=torch.uint8)
    )
    scale = np.float32(2.0 ** ((9 - 255) / 8))
    expected = [[np.float32(-0.7), np.float32(0.1)], [np.float32(0.7) * scale, np.float32(1.3) * scale]]
    assert dequantize(coded).tolist() == expected
    assert SCALES.tolist() == [0.0] + [np.float32(2.0 ** ((byte - 255) / 8)) for byte in range(1, 256)]


@pytest.mark.parametrize("scale", ["chunk", "tensor"])
def test_several_peers_are_decoded_as_each_alone(scale):
    coded = [coded_alone(largest_coefficients(seed), Quantizer(2, scale=scale)) for seed in range(3)]
    together = Quantized(*(torch.stack([getattr(one, part) for one in coded]) for part in Quantized.__annotations__))
    assert torch.equal(dequantize(together), torch.stack([dequantize(one) for one in coded]))


@pytest.mark.parametrize("codebook", ["lloyd", "bins"])
def test_several_tensors_are_coded_as_each_alone(codebook):
    """One tensor has chunks of zeros, which are not part of its codebook; one has no values; one has another shape."""
    values = torch.stack([largest_coefficients(1), largest_coefficients(2), torch.zeros(50, 32)])
    values[1, 7:20] = 0
    groups, seeds = [values, largest_coefficients(3)[None, :9, :5]], [[4, 5, 6], [7]]
    for quantizer in (Quantizer(2, codebook=codebook), Quantizer(4, "tensor", codebook, "stochastic")):
        for group, together, some in zip(groups, quantize(groups, quantizer, seeds), seeds, strict=True):
            for number, seed in enumerate(some):
                alone = coded_alone(group[number], quantizer, seed)
                one = Quantized(together.codebook[number], together.scales[number], together.codes[number])
                torch.testing.assert_close(one.codebook, alone.codebook)
                torch.testing.assert_close(dequantize(one), dequantize(alone))


def test_one_value_many_times_is_exact_enough():
    decoded = dequantize(coded_alone(torch.full((3, 8), -2.5), Quantizer(4)))
    torch.testing.assert_close(decoded, torch.full((3, 8), -2.5))


def test_huge_and_tiny_values_stay_finite():
    values = torch.tensor([[1e30, -1e30], [1e-30, 1e-30], [3.0, -4.0]])
    for bits in (1, 2, 4, 8):
        assert dequantize(coded_alone(values, Quantizer(bits))).isfinite().all()

"""Normal numbers of first weights: bytes that never change, and the moments of a normal distribution."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest
import torch

from tplr.errors import ConfigError
from tplr.training.normal_numbers import AT_ONCE, PortableNormal, normal_numbers

# They never change: every node of a run begins with them.
DIGEST = "54b84e2a3861d7f73e01f185a2ef9206f7a13659cbbae1687699e8d3fb4c2e92"


def test_bytes_never_change() -> None:
    numbers = normal_numbers(np.random.PCG64(0), 4096)
    assert numbers.dtype == np.float32
    assert hashlib.sha256(numbers.astype("<f4").tobytes()).hexdigest() == DIGEST


def test_a_number_is_the_scaled_sum_of_its_words_parts() -> None:
    words = np.random.PCG64(3).random_raw(500)
    sums = [sum(int(word) >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 2 * 0xFFFF for word in words]
    scale = Fraction(float(np.float32((3 / (2**32 - 1)) ** 0.5)))
    expected = [np.float32(float(total * scale)) for total in sums]  # a product of 18 and 24 bits is exact in float64
    assert normal_numbers(np.random.PCG64(3), 500).tolist() == expected


def test_moments_are_those_of_a_nearly_normal_distribution() -> None:
    numbers = normal_numbers(np.random.PCG64(1), 1_000_000).astype(np.float64)
    assert abs(numbers.mean()) < 4e-3  # four standard errors
    assert numbers.var() == pytest.approx(1, abs=6e-3)
    assert (numbers**4).mean() == pytest.approx(3 - 0.3, abs=0.03)
    assert np.abs(numbers).max() < 3.47
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4e-3


def test_a_module_is_filled_in_the_order_of_its_draws_with_its_own_mean_and_deviation() -> None:
    first, second = torch.empty(3, AT_ONCE // 2), torch.empty(7)
    state = torch.get_rng_state()
    with PortableNormal(5):
        torch.nn.init.normal_(first, std=0.02)
        second.normal_(1.0, 0.5)
        torch.nn.init.zeros_(third := torch.full((2,), torch.nan))
    assert torch.equal(torch.get_rng_state(), state)
    assert third.tolist() == [0, 0]
    numbers = normal_numbers(np.random.PCG64(5), first.numel() + 7)
    assert np.array_equal(first.flatten().numpy(), numbers[:-7] * np.float32(0.02))
    assert np.array_equal(second.numpy(), numbers[-7:] * np.float32(0.5) + np.float32(1.0))


@pytest.mark.parametrize("draw", [torch.Tensor.uniform_, torch.Tensor.bernoulli_])
def test_other_random_values_are_refused(draw) -> None:
    with PortableNormal(5), pytest.raises(ConfigError, match=r"draws by aten\.\w+\.\w+; expected aten\.normal_"):
        draw(torch.empty(4))

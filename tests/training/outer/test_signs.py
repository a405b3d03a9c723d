"""Signs equal those of a float64 result for any rounding of float32, number of threads and device."""

from types import SimpleNamespace

import pytest
import torch

from tplr.compress.aggregate import scatter_sum
from tplr.compress.chunks import ChunkGrid
from tplr.compress.dct import basis, inverse
from tplr.training.outer import signs
from tplr.training.outer.signs import below, signs_of_sum, zero_limit

GRID = ChunkGrid.of((512, 320), 64)


def peers(count: int, seed: int = 0):
    """Return realistic updates: most indices are small, and values have few magnitudes, so that sums often cancel."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        chance = torch.rand(GRID.chunks, GRID.entries, generator=generator) + torch.linspace(1, 0, GRID.entries)
        indices = chance.topk(32, dim=1).indices.sort(dim=1).values
        values = torch.randint(1, 3, (GRID.chunks, 32), generator=generator).float()
        values *= torch.randn(GRID.chunks, 32, generator=generator).sign()
        # cos(3y) - cos(3x): zero on the diagonal.
        indices[0], values[0] = torch.tensor([3, 3 * 64, *range(3 * 64 + 1, 3 * 64 + 31)]), 0
        values[0, 0], values[0, 1] = 1.7, -1.7
        made.append((indices, values))
    indices, values = zip(*made, strict=True)
    return torch.stack(indices), torch.stack(values)


def all_signs(made, device="cpu") -> torch.Tensor:
    made = (made[0].to(device), made[1].to(device))
    return torch.cat([GRID.join(chunks.cpu()) for _, chunks in signs_of_sum(made, GRID)])


def float64_signs(made, zero=1e-9) -> torch.Tensor:
    total = torch.zeros(GRID.chunks, GRID.entries, dtype=torch.float64)
    for indices, values in zip(*made, strict=True):
        total.scatter_add_(1, indices, values.double())
    entries = inverse(total, GRID)
    return GRID.join(torch.where(entries.abs() > zero, entries.sign(), 0)).float()


def unequal_peers():
    indices, values = peers(4)
    return indices, values * torch.tensor([1.0, 1.0, 0.5, 0.25])[:, None, None]


@pytest.fixture(scope="module")
def expected():
    return float64_signs(unequal_peers())


@pytest.mark.parametrize("threads", [1, 2])
def test_signs_are_those_of_float64_with_any_number_of_threads(threads, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(all_signs(unequal_peers()), expected)
    finally:
        torch.set_num_threads(before)


def test_a_processor_that_rounds_worse_gives_the_same_signs(expected, monkeypatch):
    chance = torch.Generator().manual_seed(9)

    def worse(coefficients, grid):
        exact = inverse(coefficients, grid)
        if exact.dtype == torch.float64:
            return exact
        size = exact.square().mean(dim=1, keepdim=True).sqrt()
        return exact + 2e-6 * size * torch.randn(exact.shape, generator=chance)

    monkeypatch.setattr(signs, "inverse", worse)
    assert torch.equal(all_signs(unequal_peers()), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_the_same_signs(expected):
    assert torch.equal(all_signs(unequal_peers(), "cuda"), expected)


def test_signs_of_one_peer_are_those_of_float64():
    one = peers(1, seed=3)
    assert torch.equal(all_signs(one), float64_signs(one))


def test_what_two_peers_take_from_each_other_is_zero():
    indices, values = peers(1)
    assert not all_signs((indices.repeat(2, 1, 1), torch.cat([values, -values]))).any()


def test_what_two_peers_leave_of_each_other_is_not_lost_in_float32():
    """Half of float32's last digit of the added values: alone in every other chunk, all of its entries are
    uncertain."""
    (indices, values), (other, small) = peers(1), peers(1, seed=5)
    values[:, ::2] = 0
    small[:, 1::2] *= 2.0**-24
    made = torch.cat([indices, other, indices]), torch.cat([values, small, -values])
    limit = 1e-10 * made[1].abs().amax(dim=2).double().sum(dim=0)[:, None]
    assert torch.equal(all_signs(made), float64_signs(made, zero=limit))


def test_the_limit_of_zero_follows_from_all_updates():
    one, two = SimpleNamespace(sha256="aa" * 32), SimpleNamespace(sha256="bb" * 32)
    limits = {zero_limit(updates) for updates in ([one], [two], [one, two], [two, one])}
    assert len(limits) == 4
    assert all(1e-10 <= limit < 2e-10 for limit in limits)
    assert zero_limit([one, two]) == zero_limit([one, two])


def test_entries_below_the_limit_are_zero():
    """Two peers cancel each other, and a third is as small as the limits."""
    (indices, values), (other, small) = peers(1), peers(1, seed=5)
    small *= 2.0**-24
    made = torch.cat([indices, other, indices]), torch.cat([values, small, -values])
    for limit in (1e-10, 1e-8, 1e-7):
        found = torch.cat([GRID.join(chunks) for _, chunks in signs_of_sum(made, GRID, limit)])
        bound = limit * made[1].abs().amax(dim=2).double().sum(dim=0)[:, None]
        assert torch.equal(found, float64_signs(made, zero=bound))


def test_peers_that_choose_how_their_sum_is_rounded():
    """Each of their additions rounds up: the sum in float32 is above zero and the exact one below it, for many
    coefficients, and so is the first entry, to which another peer adds almost nothing."""
    count, k, grid = 40, 1024, ChunkGrid.of((64, 64), 64)
    generator = torch.Generator().manual_seed(1)
    tall = basis(64, torch.float64, torch.device("cpu"))[:, 0]
    low = (64 * torch.arange(32)[:, None] + torch.arange(32)).flatten()
    high = low + 32
    tiny = 2.0**-24 * (1 + 2.0**-20)
    values = torch.full((count, 1, k), tiny)
    values[0], values[-2] = 1, -1 - 1.5 * (count - 3) * tiny
    values[-1, 0] = torch.randn(k, generator=generator).clamp(-1, 1)
    values[-1, 0, 0] -= (values[-1, 0] @ torch.outer(tall, tall).flatten()[high].float()) / (tall[0] * tall[32]).float()
    indices = torch.stack([*[low[None]] * (count - 1), high[None]])
    ((_, found),) = signs_of_sum((indices, values), grid)
    exact = inverse(scatter_sum(indices, values.double(), grid), grid)
    assert exact[0, 0] < -1e-6
    assert torch.equal(found, exact.sign().float())


def test_values_too_small_for_float32s_digits_have_the_signs_of_float64():
    indices, values = peers(3, seed=7)
    values *= 2.0**-142
    assert torch.equal(all_signs((indices, values)), float64_signs((indices, values), zero=1e-9 * 2.0**-142))


def test_entries_below_their_rows_bound():
    rows, columns = below(
        torch.tensor([[3.0, 1.0, 0.5], [2.0, 2.0, 2.0], [0.0, 9.0, 1.0]]), torch.tensor([1.0, 2.0, 5.0])
    )
    assert (rows.tolist(), columns.tolist()) == ([0, 2, 2], [2, 0, 2])

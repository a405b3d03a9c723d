"""Copies are found among many updates, the later update is the copy, and honest miners are not copies."""

import functools
from math import log

import pytest
import torch

from tplr.compress.layout import PayloadSpec
from tplr.scoring.documented.copies import COPIED, find_copies
from tplr.scoring.documented.overlap import SAMPLED_CHUNKS, Traits, overlap, sample_chunks

ENTRIES, K, CHUNKS = 4096, 32, 64


@functools.cache
def honest(seed: int, common: float = 0.5) -> Traits:
    """Return the coordinates of a miner that shares about this part of them with all others."""
    shared, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(seed)
    columns = []
    for chunk in range(CHUNKS):
        usual = torch.randperm(ENTRIES, generator=shared)[:K]
        kept = torch.rand(K, generator=own) < common**0.5
        fresh = torch.randint(0, ENTRIES, (K,), generator=own)
        columns.append(torch.where(kept, usual, fresh).unique() + chunk * ENTRIES)
    return Traits(torch.cat(columns))


def with_own_indices(stolen: Traits, share: float, seed: int) -> Traits:
    """Return a copy with some of its coordinates replaced."""
    random = torch.Generator().manual_seed(seed)
    moved = torch.rand(len(stolen.columns), generator=random) < share
    elsewhere = torch.randint(0, ENTRIES * CHUNKS, moved.shape, generator=random)
    return Traits(torch.where(moved, elsewhere, stolen.columns).unique())


def test_overlap_weighs_what_few_send() -> None:
    one, other = Traits(torch.tensor([1, 4, 9])), Traits(torch.tensor([1, 4, 11, 12]))
    found = overlap([one, other, Traits(torch.tensor([1, 2]))])
    all_three, two, alone = log(4 / 3) ** 2, log(4 / 2) ** 2, log(4 / 1) ** 2
    assert found[0, 1] == found[1, 0] == pytest.approx((all_three + two) / (all_three + two + alone))
    assert found[1, 2] == pytest.approx(all_three / (all_three + alone))  # divided by the one that sends less
    assert overlap([]).shape == (0, 0)
    assert overlap([Traits(torch.empty(0, dtype=torch.int64))] * 2).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("width", [1000, 2**24])
def test_blocks_do_not_matter(width, monkeypatch) -> None:
    traits = [honest(seed) for seed in (2, 3)]
    whole = overlap(traits)
    monkeypatch.setattr("tplr.scoring.documented.overlap.BLOCK_ENTRIES", width * 2)
    assert torch.allclose(whole, overlap(traits))


@pytest.mark.parametrize("common", [0.2, 0.6, 0.95])
def test_copies_are_found_and_the_later_one_is_the_copy(common) -> None:
    now = {uid: honest(100 + uid, common) for uid in range(8)}
    now |= {20: now[3], 21: with_own_indices(now[4], 0.1, seed=7), 22: now[3]}
    times: dict[int, float | None] = {**dict.fromkeys(range(8), 5.0), 20: 6.0, 21: 7.0, 22: 8.0}
    found = find_copies(now, times)
    assert found == {20: 3, 21: 4, 22: 20}


def test_equal_times_accuse_both_and_unknown_ones_nobody() -> None:
    now = {uid: honest(uid) for uid in (1, 2, 3)} | {4: honest(1)}
    assert set(find_copies(now, dict.fromkeys(now, 5.0))) == {1, 4}
    assert find_copies(now, {**dict.fromkeys(now, 5.0), 1: None}) == {}


@pytest.mark.parametrize("count", [2, 3, 24])
@pytest.mark.parametrize("common", [0.2, 0.6, 0.9])
def test_honest_miners_keep_their_distance_from_copies(common: float, count: int) -> None:
    """In small and larger networks, for any common part of all sent coordinates."""
    shared = overlap([honest(uid, common) for uid in range(count)]).fill_diagonal_(0)
    assert float(shared.max()) < 0.9 * COPIED


def test_others_can_t_make_two_miners_look_alike() -> None:
    """Neither as many random updates as honest ones, nor many updates of the coordinates that all have in common."""
    some = [honest(uid, 0.8) for uid in range(8)]
    for others in ([honest(10 + i, 0.0) for i in range(8)], [honest(3, 1.0)] * 20):
        shared = overlap([*some, *others])[:8, :8].fill_diagonal_(0)
        assert float(shared.max()) < 0.9 * COPIED


def test_sample_is_the_seed_s_and_skips_dense_tensors() -> None:
    shapes = {"big": (2048, 1024), "small": (64, 64), "norm": (64,)}
    spec = PayloadSpec.of(shapes, outer="demo", target_chunk=64, topk=32, bits=2)
    sample = sample_chunks(spec, 1)
    assert sum(map(len, sample.values())) == SAMPLED_CHUNKS
    assert all(list(one) == sorted(set(one)) for one in sample.values())
    assert "norm" not in sample
    assert sample == sample_chunks(spec, 1) != sample_chunks(spec, 2)
    few = PayloadSpec.of({"w": (128, 128)}, outer="demo", target_chunk=64, topk=32, bits=2)
    assert sample_chunks(few, 1) == {"w": (0, 1, 2, 3)}

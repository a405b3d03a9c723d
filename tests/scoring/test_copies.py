"""Copies are found among many, the later one is it, and honest miners are none."""

import pytest
import torch

from tplr.compress.layout import PayloadSpec
from tplr.scoring.copies import Copy, find_copies
from tplr.scoring.overlap import SAMPLED_CHUNKS, Sample, Traits, overlap

ENTRIES, K, CHUNKS = 4096, 32, 256


def honest(seed: int, common: float = 0.5, opposed: float = 0.1) -> Traits:
    """Of one who shares about this part of its coordinates with all others, some with another sign."""
    shared, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(seed)
    columns, signs = [], []
    for chunk in range(CHUNKS):
        usual = torch.randperm(ENTRIES, generator=shared)[:K]
        usual_signs = torch.randint(0, 2, (K,), generator=shared) * 2 - 1
        kept = torch.rand(K, generator=own) < common**0.5
        fresh = torch.randint(0, ENTRIES, (K,), generator=own)
        flipped = torch.where(torch.rand(K, generator=own) < opposed, -1, 1)
        places, order = torch.unique(torch.where(kept, usual, fresh), return_inverse=True)
        found = torch.zeros(len(places), dtype=torch.int64).scatter(0, order, usual_signs * flipped)
        columns.append(places + chunk * ENTRIES)
        signs.append(found)
    return Traits(torch.cat(columns), torch.cat(signs).float(), 1.0)


def with_own_indices(stolen: Traits, share: float, seed: int) -> Traits:
    """Some of a copy's coordinates elsewhere."""
    random = torch.Generator().manual_seed(seed)
    moved = torch.rand(len(stolen.columns), generator=random) < share
    places = torch.where(moved, torch.randint(0, ENTRIES * CHUNKS, moved.shape, generator=random), stolen.columns)
    order = places.argsort()
    places, signs = places[order], stolen.signs[order]
    first = torch.ones_like(places, dtype=torch.bool)
    first[1:] = places[1:] != places[:-1]
    return Traits(places[first], signs[first], 1.0)


def test_overlap_counts_what_is_shared() -> None:
    one = Traits(torch.tensor([1, 4, 9]), torch.tensor([1.0, -1.0, 0.0]), 1.0)
    other = Traits(torch.tensor([1, 4, 9, 11]), torch.tensor([1.0, 1.0, 1.0, 1.0]), 1.0)
    found = overlap([one, other])
    assert found.indices[0, 1] == found.indices[1, 0] == 1.0
    assert found.compared[0, 1] == 2  # where neither is zero
    assert found.opposed[0, 1] == 1
    assert overlap([]).indices.shape == (0, 0)


@pytest.mark.parametrize("width", [1000, 2**24])
def test_blocks_do_not_matter(width, monkeypatch) -> None:
    traits = [honest(seed) for seed in (2, 3)]
    whole = overlap(traits)
    monkeypatch.setattr("tplr.scoring.overlap.BLOCK_ENTRIES", width * 2)
    assert all(torch.equal(a, b) for a, b in zip(whole, overlap(traits), strict=True))


@pytest.mark.parametrize("common", [0.2, 0.6, 0.95])
def test_copies_are_found_and_the_later_one_is_the_copy(common) -> None:
    now = {uid: honest(100 + uid, common) for uid in range(8)}
    noisy = Traits(now[3].columns, torch.where(torch.arange(len(now[3].signs)) % 9 == 0, -1, 1) * now[3].signs, 1.0)
    now |= {20: now[3], 21: with_own_indices(now[4], 0.3, seed=7), 22: noisy}
    times: dict[int, float | None] = {**dict.fromkeys(range(8), 5.0), 20: 6.0, 21: 7.0, 22: 8.0}
    found = find_copies(now, {}, times)
    assert found == {
        20: Copy("copied_indices", 3),
        21: Copy("copied_signs", 4),
        22: Copy("copied_indices", 20),
    }


def test_equal_times_accuse_both_and_unknown_ones_nobody() -> None:
    now = {uid: honest(uid) for uid in (1, 2, 3)} | {4: honest(1)}
    assert set(find_copies(now, {}, dict.fromkeys(now, 5.0))) == {1, 4}
    assert find_copies(now, {}, {**dict.fromkeys(now, 5.0), 1: None}) == {}


def test_an_update_that_comes_again_is_stale() -> None:
    now = {uid: honest(uid) for uid in (1, 2, 3)}
    before = {1: honest(11), 2: now[3], 3: honest(13)}
    assert find_copies(now, before, dict.fromkeys(now, 1.0)) == {3: Copy("stale", 2)}
    assert find_copies({1: now[1]}, {1: now[1]}, {1: 1.0}) == {1: Copy("stale", 1)}


@pytest.mark.parametrize(("common", "opposed"), [(0.9, 0.005), (0.6, 0.05), (0.2, 0.3)])
def test_honest_miners_are_no_copies(common, opposed) -> None:
    """Early in a run, when all send nearly the same, and later: not one of some hundreds of pairs."""
    now = {uid: honest(uid, common, opposed) for uid in range(24)}
    assert find_copies(now, {}, dict.fromkeys(now, 1.0)) == {}


def test_sample_is_the_seed_s_and_skips_dense_tensors() -> None:
    shapes = {"big": (2048, 1024), "small": (64, 64), "norm": (64,)}
    spec = PayloadSpec.of(shapes, outer="demo", target_chunk=64, topk=32, bits=2)
    sample = Sample.of(spec, 1)
    assert sum(map(len, sample.chunks.values())) == SAMPLED_CHUNKS
    assert all(list(one) == sorted(set(one)) for one in sample.chunks.values())
    assert "norm" not in sample.chunks
    assert sample == Sample.of(spec, 1) != Sample.of(spec, 2)
    few = PayloadSpec.of({"w": (128, 128)}, outer="demo", target_chunk=64, topk=32, bits=2)
    assert Sample.of(few, 1).chunks == {"w": (0, 1, 2, 3)}

"""Inner products from sparse coordinates against NumPy's of whole tensors, and the sample of chunks."""

import numpy as np
import pytest
import torch

from tplr.compress.inner_products import blocks, dense_products, gram_matrix, sample_chunks, sample_size
from tplr.compress.layout import PayloadSpec

PEERS, CHUNKS = 5, 9


# Few and many entries of a small chunk, and of one so large that chunks are taken in parts.
@pytest.mark.parametrize(("k", "entries"), [(4, 128), (4, 64), (32, 32), (2**13, 2**17)])
def test_products_are_those_of_whole_tensors(k: int, entries: int) -> None:
    generator = torch.Generator().manual_seed(0)
    indices = torch.rand(PEERS, CHUNKS, entries, generator=generator).argsort(dim=2)[..., :k].sort(dim=2).values
    values = torch.randn(PEERS, CHUNKS, k, generator=generator)
    whole = torch.zeros(PEERS, CHUNKS, entries).scatter_(2, indices, values).flatten(1).double().numpy()
    other = torch.randn(CHUNKS, entries, generator=generator)
    np.testing.assert_allclose(gram_matrix(indices, values, entries), whole @ whole.T, rtol=1e-12, atol=1e-12)
    expected = whole @ other.flatten().double().numpy()
    np.testing.assert_allclose(dense_products(indices, values, other), expected, rtol=1e-12)


def test_rows_of_large_chunks_are_taken_in_parts():
    entries = 2**17
    indices = torch.arange(PEERS * CHUNKS).view(PEERS, CHUNKS, 1) % 3
    values = torch.arange(1.0, 1 + PEERS * CHUNKS).view(PEERS, CHUNKS, 1)
    found, expected = gram_matrix(indices, values, entries), np.zeros((PEERS, PEERS))
    for i in range(PEERS):
        for j in range(PEERS):
            expected[i, j] = ((indices[i] == indices[j]) * values[i] * values[j]).sum()
    np.testing.assert_array_equal(found, expected)


def test_blocks_cover_the_sample_in_order():
    chunks = np.arange(0, 3000, 3)
    parts = blocks(chunks, peers=2**12, k=2**4)
    assert len(parts) > 1
    np.testing.assert_array_equal(np.concatenate(parts), chunks)


def test_more_updates_are_compared_in_fewer_chunks():
    assert sample_size(0) == sample_size(20) == sample_size(128) == 2**14
    assert sample_size(256) == 2**12


def test_a_sample_is_all_chunks_of_a_small_model_and_else_the_seed_chooses():
    spec = PayloadSpec.of({"large": (1024, 1024), "small": (64, 64)}, outer="demo", target_chunk=16, topk=4, bits=2)
    every = sample_chunks(spec, seed=1, limit=sample_size(20))
    assert [every[name].tolist() for name in spec.tensors] == [list(range(4096)), list(range(16))]
    some = sample_chunks(spec, seed=1, limit=512)
    assert [len(some[name]) for name in spec.tensors] == [511, 8]
    assert (np.diff(some["large"]) > 0).all()
    assert sample_chunks(spec, seed=1, limit=512)["large"].tolist() == some["large"].tolist()
    assert sample_chunks(spec, seed=2, limit=512)["large"].tolist() != some["large"].tolist()
    counts = sum(np.bincount(sample_chunks(spec, seed, limit=512)["large"], minlength=4096) for seed in range(100))
    assert 12.0 < counts.mean() < 13.0
    assert counts.max() < 35  # of 100, at a chance of an eighth

"""Rows of indices survive a round trip; any other input is refused."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.compress import bits
from tplr.compress.elias_fano import bits_per_row, decode, encode, low_bits
from tplr.errors import PayloadError


@pytest.mark.parametrize(("n", "k", "per_index"), [(4096, 32, 9.0), (4096, 64, 8.0), (64, 32, 3.0)])
def test_bits_per_index_are_those_of_the_formula(n, k, per_index):
    assert bits_per_row(n, k) / k == per_index


def test_a_row_written_by_hand():
    # n = 10, k = 3: one low bit each, bitmap of 3 + 5. Indices 1, 4, 9: low 1 0 1, high 0 2 4 at places 0, 3, 6.
    assert low_bits(10, 3) == 1
    assert encode(torch.tensor([[1, 4, 9]]), 10).tolist() == [0b0100_1101, 0b010]
    # Low bits of both rows come first, then both bitmaps. Indices 0, 1, 2: low 0 1 0, high 0 0 1 at places 0, 1, 3.
    two = encode(torch.tensor([[1, 4, 9], [0, 1, 2]]), 10)
    assert two.tolist() == [0b01_010_101, 0b11_0100_10, 0b00_0010]


@settings(max_examples=40)
@given(st.data())
def test_round_trip(data):
    n = data.draw(st.integers(1, 300))
    k = data.draw(st.integers(1, n))
    row = st.lists(st.integers(0, n - 1), min_size=k, max_size=k, unique=True).map(sorted)
    indices = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    packed = encode(indices, n)
    assert len(packed) == bits.packed_size(len(indices) * bits_per_row(n, k), 1)
    both = torch.stack([packed, encode(indices.flip(0), n)])
    for checked in (False, True):
        decoded = decode(both, len(indices), n, k, checked=checked)
        assert torch.equal(decoded, torch.stack([indices, indices.flip(0)]))


@pytest.mark.parametrize(("n", "k"), [(6, 2), (7, 2), (5, 3), (4, 4), (9, 1)])
def test_every_bit_string_is_refused_or_the_only_spelling_of_its_row(n, k):
    size = bits_per_row(n, k)
    accepted = set()
    for string in itertools.product((0, 1), repeat=size):
        packed = bits.pack(torch.tensor(string), 1)
        try:
            indices = decode(packed[None], 1, n, k)[0]
        except PayloadError:
            continue
        assert torch.equal(encode(indices, n), packed)
        accepted.add(tuple(indices[0].tolist()))
    assert accepted == set(itertools.combinations(range(n), k))

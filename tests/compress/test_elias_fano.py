"""Rows of indices survive; everything that is no row of indices is refused."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.compress import bits
from tplr.compress.elias_fano import bits_per_row, decode, decode_bits, encode, group_count, low_bits, row_bits
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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_one_index_of_each_group_survives(data):
    n = data.draw(st.integers(1, 300))
    k = group_count(n, data.draw(st.integers(1, n)))
    size = 1 << low_bits(n, k, grouped=True)
    row = st.tuples(*(st.integers(start, min(start + size, n) - 1) for start in range(0, n, size))).map(list)
    indices = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    packed = encode(indices, n, grouped=True)
    assert len(packed) == bits.packed_size(len(indices) * bits_per_row(n, k, grouped=True), 1)
    for checked in (False, True):
        out = torch.empty_like(indices)
        assert torch.equal(decode(packed, len(indices), n, k, grouped=True, checked=checked, out=out), indices)
    some = row_bits(np.array([len(indices) - 1]), len(indices), n, k, grouped=True)
    all_bits = bits.unpack(packed, 1, len(indices) * bits_per_row(n, k, grouped=True))
    assert torch.equal(decode_bits(all_bits[some], 1, n, k, grouped=True), indices[-1:])


@pytest.mark.parametrize(("n", "k"), [(8, 2), (7, 2), (9, 3), (4, 4), (5, 1)])
def test_every_bit_string_of_groups_is_refused_or_the_only_spelling_of_its_row(n, k):
    size = 1 << low_bits(n, k, grouped=True)
    accepted = set()
    for string in itertools.product((0, 1), repeat=bits_per_row(n, k, grouped=True)):
        packed = bits.pack(torch.tensor(string, dtype=torch.uint8), 1)
        try:
            indices = decode(packed[None], 1, n, k, grouped=True)[0]
        except PayloadError:
            continue
        assert torch.equal(encode(indices, n, grouped=True), packed)
        accepted.add(tuple(indices[0].tolist()))
    assert accepted == set(itertools.product(*(range(start, min(start + size, n)) for start in range(0, n, size))))


def test_a_group_without_an_index_is_refused_when_encoding():
    with pytest.raises(ValueError, match="not one in each of 2 groups of 4 entries"):
        encode(torch.tensor([[1, 3]]), 8, grouped=True)

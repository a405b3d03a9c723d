"""One index of each group survives a round trip; any other input is refused."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.compress import bits
from tplr.compress.interleaved import bits_per_row, decode, decode_bits, encode, group_count, place_bits, row_bits
from tplr.errors import PayloadError


@pytest.mark.parametrize(
    ("n", "topk", "k", "width"), [(4096, 128, 128, 5), (4096, 88, 128, 5), (10, 3, 5, 1), (9, 9, 9, 0), (5, 1, 2, 2)]
)
def test_groups_have_at_most_a_power_of_two_entries(n, topk, k, width):
    assert (group_count(n, topk), place_bits(n, k), bits_per_row(n, k)) == (k, width, k * width)


def test_a_row_written_by_hand():
    # n = 10, k = 3: groups 0 3 6 9, 1 4 7, 2 5 8. Indices 9, 1, 5 are places 3, 0, 1: low bits 1 0 1, high bits 1 0 0.
    assert encode(torch.tensor([[9, 1, 5]]), 10).tolist() == [0b001_101]
    # Low bits of both rows come first.
    assert encode(torch.tensor([[9, 1, 5], [0, 7, 2]]), 10).tolist() == [0b01_000_101, 0b0100]


@settings(max_examples=40)
@given(st.data())
def test_round_trip(data):
    n = data.draw(st.integers(1, 300))
    k = data.draw(st.integers(1, n))
    row = st.tuples(*(st.sampled_from(range(group, n, k)) for group in range(k))).map(list)
    indices = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    rows, packed = len(indices), encode(indices, n)
    assert len(packed) == bits.packed_size(rows * bits_per_row(n, k), 1)
    both = torch.stack([packed, encode(indices.flip(0), n)])
    for checked in (False, True):
        out = torch.empty(2, rows, k, dtype=torch.int64)
        decoded = decode(both, rows, n, k, checked=checked, out=out)
        assert torch.equal(decoded, torch.stack([indices, indices.flip(0)]))
    all_bits = bits.unpack(packed, 1, rows * bits_per_row(n, k))
    assert torch.equal(decode_bits(all_bits[row_bits(np.array([rows - 1]), rows, n, k)], 1, n, k), indices[-1:])


@pytest.mark.parametrize(("n", "k"), [(8, 2), (7, 2), (9, 3), (4, 4), (5, 1)])
def test_every_bit_string_is_refused_or_the_only_spelling_of_its_row(n, k):
    accepted = set()
    for string in itertools.product((0, 1), repeat=bits_per_row(n, k)):
        packed = bits.pack(torch.tensor(string, dtype=torch.uint8), 1)
        try:
            indices = decode(packed[None], 1, n, k)[0]
        except PayloadError:
            continue
        assert torch.equal(encode(indices, n), packed)
        accepted.add(tuple(indices[0].tolist()))
    assert accepted == set(itertools.product(*(range(group, n, k) for group in range(k))))


@pytest.mark.parametrize("wrong", [[1, 0], [0, 2], [0, 0]])
def test_an_index_of_another_group_is_refused_when_encoding(wrong):
    with pytest.raises(ValueError, match="not one of each of 2 groups"):
        encode(torch.tensor([wrong]), 8)

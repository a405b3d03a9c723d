"""Bit packing against NumPy's, and the single valid padding."""

import numpy as np
import pytest
import torch

from tplr.compress.bits import pack, packed_size, positions, unpack
from tplr.errors import PayloadError


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 7, 8, 33])
def test_round_trip_and_bit_order(width, count):
    codes = torch.randint(0, 2**width, (count,), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    packed = pack(codes, width)
    bits = (codes.numpy()[:, None] >> np.arange(width)) & 1
    assert packed.numpy().tobytes() == np.packbits(bits.ravel(), bitorder="little").tobytes()
    assert len(packed) == packed_size(count, width)
    assert torch.equal(unpack(packed, width, count), codes)


def test_set_padding_is_refused():
    with pytest.raises(PayloadError, match="after the last"):
        unpack(torch.tensor([0b1000_0000], dtype=torch.uint8), 1, 7)


def test_positions_of_ones():
    flags = torch.tensor([0, 1, 1, 0, 1], dtype=torch.uint8)
    assert positions(flags).tolist() == positions(flags.bool()).tolist() == [1, 2, 4]

"""Elias–Fano coding of sorted indices: a fixed number of bits for k indices below n.

An index is split into ``l = max(0, floor(log2(n / k)))`` low bits and a high part. The low bits are written unchanged.
The high part is written in unary: bit ``high + i`` of the row's bitmap is set for the i-th index. The low bits of
all rows come first, plane by plane (the lowest bit of every index, then the next one). The bitmaps of all rows follow,
``k + ceil(n / 2**l)`` bits each. There is no padding in between.

k = 32 of n = 4096 takes 9.0 bits an index, k = 64 takes 8.0; the bounds ``log2(binomial(n, k)) / k`` are 8.32 and 7.36.

Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 21 (1974).
"""

import numpy as np
import torch

from tplr.compress import bits
from tplr.errors import PayloadError


def low_bits(n: int, k: int) -> int:
    """Return ``max(0, floor(log2(n / k)))``, in integer arithmetic."""
    return max(0, (n // k).bit_length() - 1)


def bits_per_row(n: int, k: int) -> int:
    """Return the number of bits for k indices below n."""
    low = low_bits(n, k)
    return k * low + k + -(-n >> low)


def encode(indices: torch.Tensor, n: int) -> torch.Tensor:
    """Encode int64 [..., rows, k], strictly increasing in [0, n), to uint8 [..., packed_size].

    ``packed_size`` is ``packed_size(rows * bits_per_row(n, k), 1)``.
    """
    *tensors, rows, k = indices.shape
    low = low_bits(n, k)
    device = indices.device
    all_bits = torch.zeros(*tensors, rows * bits_per_row(n, k), dtype=torch.uint8, device=device)
    planes, bitmap = _split(all_bits, rows, k, low)
    planes.copy_(bits.planes(indices, low))
    bitmap.scatter_(-1, (indices >> low) + torch.arange(k, device=device), 1)
    return bits.pack(all_bits, 1)


def decode(
    packed: torch.Tensor, rows: int, n: int, k: int, *, checked: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Invert ``encode``: uint8 [..., packed_size] → int64 [..., rows, k].

    Args:
        checked: these bytes were decoded before. They are not checked again, as checks take a quarter of the time.
        out: int64 [..., rows, k], written to and returned if given.

    Raises:
        PayloadError: a row has not exactly k ones, does not increase strictly, or leaves [0, n).
    """
    return _decode(bits.unpack(packed, 1, rows * bits_per_row(n, k)), rows, n, k, checked=checked, out=out)


def row_bits(chosen: np.ndarray, rows: int, n: int, k: int) -> np.ndarray:
    """Return the places of some rows' bits in the encoding of ``rows`` rows: int64 [chosen] → [bits].

    ``decode_bits`` takes the bits at these places.
    """
    low = low_bits(n, k)
    planes = bits.plane_places(chosen, rows, k, low)
    size = bits_per_row(n, k) - k * low
    bitmaps = rows * k * low + size * chosen[:, None] + np.arange(size)
    return np.concatenate([planes.ravel(), bitmaps.ravel()])


def decode_bits(all_bits: torch.Tensor, rows: int, n: int, k: int) -> torch.Tensor:
    """Decode rows that were checked before, from their bits: uint8 [..., bits], 0 or 1 each → int64 [..., rows, k]."""
    return _decode(all_bits, rows, n, k, checked=True, out=None)


def _decode(
    all_bits: torch.Tensor, rows: int, n: int, k: int, *, checked: bool, out: torch.Tensor | None
) -> torch.Tensor:
    low = low_bits(n, k)
    device = all_bits.device
    planes, bitmaps = _split(all_bits, rows, k, low)
    bitmap = bitmaps.reshape(-1, bitmaps.shape[-1])
    if not checked and not (bitmap.sum(dim=1, dtype=torch.int32) == k).all():
        raise PayloadError(f"indices: a row has not exactly {k} entries")
    # The high part is the position of the set bit, minus the bits of previous rows and the set bits before it.
    highs = bits.positions(bitmap.reshape(-1)).view(len(bitmap), k)
    highs -= torch.arange(0, bitmap.numel(), bitmap.shape[1], device=device)[:, None]
    highs -= torch.arange(k, device=device)
    highs = highs.bitwise_left_shift_(low).view(*all_bits.shape[:-1], rows, k)
    indices = torch.add(highs, bits.from_planes(planes), out=highs if out is None else out)
    if checked:
        return indices
    if not (indices[..., 1:] > indices[..., :-1]).all():
        raise PayloadError("indices: a row does not increase strictly")
    if not (indices[..., -1] < n).all():
        raise PayloadError(f"indices: a row has an index above {n - 1}")
    return indices


def _split(all_bits: torch.Tensor, rows: int, k: int, low: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the low bits [..., low, rows, k] and of the bitmaps [..., rows, bits]."""
    planes, bitmaps = all_bits.tensor_split([rows * k * low], dim=-1)
    return planes.unflatten(-1, (low, rows, k)), bitmaps.unflatten(-1, (rows, -1))

"""Sorted indices ↔ bits: Elias–Fano coding, a fixed number of bits for k of n.

An index is split into ``l = max(0, floor(log2(n / k)))`` low bits, written as they are, and a high part, written in
unary: bit ``high + i`` of a bitmap is set for the i-th index. A row of k indices takes ``k * l`` bits for the low
parts, lowest first, then ``k + ceil(n / 2**l)`` for the bitmap; rows follow each other without gaps.
Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 21 (1974).

k = 32 of n = 4096 takes 9.0 bits an index and k = 64 takes 8.0; the bounds ``log2(binomial(n, k)) / k`` are 8.32 and
7.36.
"""

import torch

from tplr.compress import bits
from tplr.errors import PayloadError


def low_bits(n: int, k: int) -> int:
    """``max(0, floor(log2(n / k)))``, in integers."""
    return max(0, (n // k).bit_length() - 1)


def bits_per_row(n: int, k: int) -> int:
    """Bits of k indices below n."""
    low = low_bits(n, k)
    return k * low + k + -(-n >> low)


def encode(indices: torch.Tensor, n: int) -> torch.Tensor:
    """Int64 [rows, k], strictly increasing in [0, n) → uint8 [packed_size(rows * bits_per_row(n, k), 1)]."""
    rows, k = indices.shape
    low = low_bits(n, k)
    device = indices.device
    lows = (indices[:, :, None] >> torch.arange(low, device=device)) & 1
    bitmap = torch.zeros(rows, bits_per_row(n, k) - k * low, dtype=torch.bool, device=device)
    bitmap.scatter_(1, (indices >> low) + torch.arange(k, device=device), True)
    return bits.pack(torch.cat([lows.view(rows, k * low).bool(), bitmap], dim=1).view(-1), 1)


def decode(packed: torch.Tensor, rows: int, n: int, k: int) -> torch.Tensor:
    """The inverse of ``encode``: int64 [rows, k].

    Raises:
        PayloadError: a row has not exactly k ones, does not increase strictly, or leaves [0, n).
    """
    low = low_bits(n, k)
    device = packed.device
    all_bits = bits.unpack(packed, 1, rows * bits_per_row(n, k)).view(rows, -1)
    bitmap = all_bits[:, k * low :]
    if not (bitmap.sum(dim=1) == k).all():
        raise PayloadError(f"indices: a row has not exactly {k} entries")
    high = bitmap.nonzero()[:, 1].view(rows, k) - torch.arange(k, device=device)
    lows = all_bits[:, : k * low].view(rows, k, low).to(torch.int64)
    indices = (high << low) + (lows << torch.arange(low, device=device)).sum(dim=2)
    if not (indices[:, 1:] > indices[:, :-1]).all():
        raise PayloadError("indices: a row does not increase strictly")
    if not (indices[:, -1] < n).all():
        raise PayloadError(f"indices: a row has an index above {n - 1}")
    return indices

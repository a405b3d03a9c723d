"""Elias–Fano coding of sorted indices: a fixed number of bits for k indices below n.

An index is split into ``l = max(0, floor(log2(n / k)))`` low bits and a high part. The low bits are written as they
are. The high part is written in unary: bit ``high + i`` of the row's bitmap is set for the i-th index. The low bits of
all rows come first, plane by plane (the lowest bit of every index, then the next one). The bitmaps of all rows follow,
``k + ceil(n / 2**l)`` bits each. There is no padding in between.

k = 32 of n = 4096 takes 9.0 bits an index, k = 64 takes 8.0; the bounds ``log2(binomial(n, k)) / k`` are 8.32 and 7.36.

``grouped`` rows have one index in each of k groups of ``2**l`` neighbours (the last group may be shorter). Their high
parts are 0, 1, ..., k - 1, so there is no bitmap: k = 128 of 4096 takes 5 bits an index.

Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 21 (1974).
"""

import numpy as np
import torch

from tplr.compress import bits, search
from tplr.errors import PayloadError


def low_bits(n: int, k: int, *, grouped: bool = False) -> int:
    """``max(0, floor(log2(n / k)))``, or ``ceil`` for grouped rows, in integer arithmetic."""
    return (-(-n // k) - 1).bit_length() if grouped else max(0, (n // k).bit_length() - 1)


def group_count(n: int, k: int) -> int:
    """Number of groups of a row of n entries: k, or more if ``n / k`` is no power of two."""
    return -(-n >> low_bits(n, k))


def bits_per_row(n: int, k: int, *, grouped: bool = False) -> int:
    """Bits of k indices below n."""
    low = low_bits(n, k, grouped=grouped)
    return k * low + _bitmap_bits(n, k, low, grouped=grouped)


def encode(indices: torch.Tensor, n: int, *, grouped: bool = False) -> torch.Tensor:
    """Int64 [..., rows, k], strictly increasing in [0, n) → uint8 [..., packed_size(rows * bits_per_row(n, k), 1)].

    Raises:
        ValueError: grouped rows that have not one index in each group.
    """
    *tensors, rows, k = indices.shape
    low = low_bits(n, k, grouped=grouped)
    device = indices.device
    all_bits = torch.zeros(*tensors, rows * bits_per_row(n, k, grouped=grouped), dtype=torch.uint8, device=device)
    planes, bitmap = _split(all_bits, rows, k, low)
    shifts = torch.arange(low, dtype=torch.int32, device=device)[:, None, None]
    planes.copy_((indices.unsqueeze(-3).int() >> shifts) & 1)
    highs, number = indices >> low, torch.arange(k, device=device)
    if not grouped:
        bitmap.scatter_(-1, highs + number, 1)
    elif not (highs == number).all():
        raise ValueError(f"indices: not one in each of {k} groups of {2**low} entries")
    return bits.pack(all_bits, 1)


def decode(
    packed: torch.Tensor,
    rows: int,
    n: int,
    k: int,
    *,
    grouped: bool = False,
    checked: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The inverse of ``encode``: uint8 [..., packed_size] → int64 [..., rows, k].

    Args:
        checked: these bytes were decoded before. They are not checked again, which would take a quarter of the time.
        out: int64 [..., rows, k], written to and returned if given.

    Raises:
        PayloadError: a row has not exactly k ones, does not increase strictly, or leaves [0, n). Of grouped rows only
            the last can happen, and only if the last group is shorter.
    """
    all_bits = bits.unpack(packed, 1, rows * bits_per_row(n, k, grouped=grouped))
    return _decode(all_bits, rows, n, k, grouped=grouped, checked=checked, out=out)


def row_bits(chosen: np.ndarray, rows: int, n: int, k: int, *, grouped: bool = False) -> np.ndarray:
    """Places in the encoding of ``rows`` rows of the bits of some: int64 [chosen] → [bits], for ``decode_bits``."""
    low = low_bits(n, k, grouped=grouped)
    planes = rows * k * np.arange(low)[:, None, None] + k * chosen[:, None] + np.arange(k)
    size = _bitmap_bits(n, k, low, grouped=grouped)
    bitmaps = rows * k * low + size * chosen[:, None] + np.arange(size)
    return np.concatenate([planes.ravel(), bitmaps.ravel()])


def decode_bits(all_bits: torch.Tensor, rows: int, n: int, k: int, *, grouped: bool = False) -> torch.Tensor:
    """Decode rows that were checked before, from their bits: uint8 [..., bits], 0 or 1 each → int64 [..., rows, k]."""
    return _decode(all_bits, rows, n, k, grouped=grouped, checked=True, out=None)


def _decode(
    all_bits: torch.Tensor, rows: int, n: int, k: int, *, grouped: bool, checked: bool, out: torch.Tensor | None
) -> torch.Tensor:
    low = low_bits(n, k, grouped=grouped)
    device = all_bits.device
    planes, bitmaps = _split(all_bits, rows, k, low)
    if grouped:
        highs = (torch.arange(k, device=device) << low).repeat(*all_bits.shape[:-1], rows, 1)
    else:
        highs = _highs(bitmaps.reshape(-1, bitmaps.shape[-1]), k, checked=checked).bitwise_left_shift_(low)
        highs = highs.view(*all_bits.shape[:-1], rows, k)
    lows = torch.zeros(highs.shape, dtype=torch.uint8 if low <= 8 else torch.int32, device=device)
    for plane in reversed(planes.unbind(-3)):
        lows.add_(lows).add_(plane)
    indices = torch.add(highs, lows, out=highs if out is None else out)
    if checked:
        return indices
    if not grouped and not (indices[..., 1:] > indices[..., :-1]).all():
        raise PayloadError("indices: a row does not increase strictly")
    if not (indices[..., -1] < n).all():
        raise PayloadError(f"indices: a row has an index above {n - 1}")
    return indices


def _highs(bitmap: torch.Tensor, k: int, *, checked: bool) -> torch.Tensor:
    """High parts of rows, int64 [rows, k]: a one's position in its row [rows, bits], minus the ones before it."""
    if not checked and not (bitmap.sum(dim=1, dtype=torch.int32) == k).all():
        raise PayloadError(f"indices: a row has not exactly {k} entries")
    highs = search.nonzero(bitmap.reshape(-1)).view(len(bitmap), k)
    highs -= torch.arange(0, bitmap.numel(), bitmap.shape[1], device=bitmap.device)[:, None]
    return highs.sub_(torch.arange(k, device=bitmap.device))


def _bitmap_bits(n: int, k: int, low: int, *, grouped: bool) -> int:
    return 0 if grouped else k + -(-n >> low)


def _split(all_bits: torch.Tensor, rows: int, k: int, low: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the low bits [..., low, rows, k] and of the bitmaps [..., rows, bits]."""
    planes, bitmaps = all_bits.tensor_split([rows * k * low], dim=-1)
    size = bitmaps.shape[-1] // rows
    return planes.unflatten(-1, (low, rows, k)), bitmaps.unflatten(-1, (rows, size))

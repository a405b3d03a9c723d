"""Codes indices with one index per group: only its place in the group is written.

Group j of k has the entries j, j + k, j + 2k, ... of a row of n. A place takes ``ceil(log2(ceil(n / k)))`` bits, the
same for every group: 5 of them for k = 128 of 4096, where Elias–Fano takes 7 for any 128 entries. The places of all
rows come plane by plane (the lowest bit of every place, then the next one), without padding in between.

In a chunk of 64 x 64 with k = 128, a group is every second entry of a column. A chunk's rows are spread over the matrix
(``ChunkGrid``), so a group has as many frequent tokens of an embedding as rare ones, whose small values it leaves out.
"""

import numpy as np
import torch

from tplr.compress import bits
from tplr.errors import PayloadError


def group_count(n: int, k: int) -> int:
    """Return the number of groups: the smallest from k on whose largest group's size is a power of two, or n."""
    return -(-n >> ((n // k).bit_length() - 1))


def place_bits(n: int, k: int) -> int:
    """Return ``ceil(log2(ceil(n / k)))``, in integer arithmetic."""
    return (-(-n // k) - 1).bit_length()


def bits_per_row(n: int, k: int) -> int:
    """Return the number of bits for k indices below n."""
    return k * place_bits(n, k)


def encode(indices: torch.Tensor, n: int) -> torch.Tensor:
    """Encode int64 [..., rows, k] below n, the j-th index in group j, to uint8 [..., packed_size].

    ``packed_size`` is ``packed_size(rows * bits_per_row(n, k), 1)``.

    Raises:
        ValueError: an index is not in its group.
    """
    k = indices.shape[-1]
    if not (indices % k == torch.arange(k, device=indices.device)).all():
        raise ValueError(f"indices: not one of each of {k} groups, in their order")
    return bits.pack(bits.planes(indices // k, place_bits(n, k)).flatten(-3), 1)


def decode(
    packed: torch.Tensor, rows: int, n: int, k: int, *, checked: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Invert ``encode``: uint8 [..., packed_size] → int64 [..., rows, k].

    Args:
        checked: these bytes were decoded before; they are not checked again.
        out: int64 [..., rows, k], written to and returned if given.

    Raises:
        PayloadError: a group has no such place.
    """
    return _decode(bits.unpack(packed, 1, rows * bits_per_row(n, k)), rows, n, k, checked=checked, out=out)


def row_bits(chosen: np.ndarray, rows: int, n: int, k: int) -> np.ndarray:
    """Return the places of some rows' bits in the encoding of ``rows`` rows: int64 [chosen] → [bits].

    ``decode_bits`` takes the bits at these places.
    """
    return bits.plane_places(chosen, rows, k, place_bits(n, k)).ravel()


def decode_bits(all_bits: torch.Tensor, rows: int, n: int, k: int) -> torch.Tensor:
    """Decode rows that were checked before, from their bits: uint8 [..., bits], 0 or 1 each → int64 [..., rows, k]."""
    return _decode(all_bits, rows, n, k, checked=True, out=None)


def _decode(
    all_bits: torch.Tensor, rows: int, n: int, k: int, *, checked: bool, out: torch.Tensor | None
) -> torch.Tensor:
    places = bits.from_planes(all_bits.unflatten(-1, (place_bits(n, k), rows, k)))
    numbers = torch.arange(k, device=all_bits.device)
    indices = torch.add(numbers, places, alpha=k, out=out)
    if not (checked or (indices < n).all()):
        raise PayloadError(f"indices: a row has an index above {n - 1}")
    return indices

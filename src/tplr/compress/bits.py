"""Small integers ↔ packed bytes, the first integer in the lowest bits of the first byte; and planes of bits."""

import functools

import numpy as np
import torch
from torch.nn.functional import pad

from tplr.errors import PayloadError

# By code width: the integer type that holds the unpacked codes of one byte, one byte per code.
_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16, 8: torch.uint8}


def packed_size(count: int, width: int) -> int:
    """Return the number of bytes for ``count`` integers of ``width`` bits."""
    return (count * width + 7) // 8


def pack(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Pack each row: uint8 or bool [..., count], values below ``2**width`` → uint8 [..., packed_size].

    ``width`` is 1, 2, 4 or 8.
    """
    per_byte = 8 // width
    padded = pad(codes.to(torch.uint8), (0, -codes.shape[-1] % per_byte))
    # One product moves all codes of a word into its highest byte.
    moves = sum(1 << (8 * (per_byte - 1) - (8 - width) * index) for index in range(per_byte))
    return (padded.view(_WORDS[width]) * moves).view(torch.uint8)[..., per_byte - 1 :: per_byte].contiguous()


def unpack(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Invert ``pack``: uint8 [..., packed_size] → uint8 [..., count].

    Raises:
        PayloadError: a padding bit is set, because every value must have exactly one encoding.
    """
    words = _codes_of_a_byte(width, packed.device).index_select(0, packed.reshape(-1).int())
    codes = words.view(packed.shape).view(torch.uint8)
    if codes.shape[-1] > count and codes[..., count:].any():
        raise PayloadError(f"bits are set after the last of {count} packed integers")
    return codes[..., :count]


def pick(packed: np.ndarray, width: int, places: np.ndarray) -> np.ndarray:
    """Unpack the integers at some places: uint8 [bytes] and int64 places of any shape → uint8 of that shape."""
    per_byte = 8 // width  # a power of two: shifts and masks are several times faster than divisions
    shifts = ((places & (per_byte - 1)) * width).astype(np.uint8)
    return (packed[places >> (per_byte.bit_length() - 1)] >> shifts) & np.uint8(2**width - 1)


def planes(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` lowest bits of integers below 2**31: [..., rows, k] → uint8 [..., count, rows, k].

    The lowest bit comes first.
    """
    shifts = torch.arange(count, dtype=torch.int32, device=numbers.device)[:, None, None]
    return ((numbers.unsqueeze(-3).int() >> shifts) & 1).to(torch.uint8)


def from_planes(planes: torch.Tensor) -> torch.Tensor:
    """Invert ``planes``: uint8 [..., count, rows, k] → uint8 or int32 [..., rows, k]."""
    *leading, count, rows, k = planes.shape
    dtype = torch.uint8 if count <= 8 else torch.int32
    numbers = torch.zeros(*leading, rows, k, dtype=dtype, device=planes.device)
    for plane in reversed(planes.unbind(-3)):
        numbers.add_(numbers).add_(plane)
    return numbers


def plane_places(chosen: np.ndarray, rows: int, k: int, count: int) -> np.ndarray:
    """Return the places of some rows' bits in ``count`` planes of [rows, k]: int64 [chosen] → [count, chosen, k]."""
    return rows * k * np.arange(count)[:, None, None] + k * chosen[:, None] + np.arange(k)


@functools.lru_cache(maxsize=16)
def _codes_of_a_byte(width: int, device: torch.device) -> torch.Tensor:
    """Return a table [256] from a byte to the word with its codes: a look-up is eight times faster than shifts."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    codes = (torch.arange(256, dtype=torch.uint8)[:, None] >> shifts) & (2**width - 1)
    return codes.view(_WORDS[width]).view(256).to(device)


def positions(flags: torch.Tensor) -> torch.Tensor:
    """Return the positions of set bits, uint8 (0 or 1) or bool [count] → int64, ascending."""
    if flags.device.type == "cpu":
        # NumPy's search has no branches: on a bitmap that is half ones it takes a tenth of torch's time.
        return torch.from_numpy(np.flatnonzero(flags.view(torch.bool).numpy()))
    return flags.nonzero().squeeze(1)

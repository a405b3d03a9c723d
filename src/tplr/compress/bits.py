"""Small integers ↔ packed bytes, the first one in the lowest bits of the first byte."""

import functools

import numpy as np
import torch
from torch.nn.functional import pad

from tplr.errors import PayloadError

# An integer type as wide as the codes of one packed byte, at a byte each.
_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16, 8: torch.uint8}


def packed_size(count: int, width: int) -> int:
    """Bytes of ``count`` integers of ``width`` bits."""
    return (count * width + 7) // 8


def pack(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Row by row, uint8 or bool [..., count], each below ``2**width`` → uint8 [..., packed_size].

    ``width`` is 1, 2, 4 or 8.
    """
    per_byte = 8 // width
    padded = pad(codes.to(torch.uint8), (0, -codes.shape[-1] % per_byte))
    # One product moves all codes of a word to their places in its highest byte.
    moves = sum(1 << (8 * (per_byte - 1) - (8 - width) * place) for place in range(per_byte))
    return (padded.view(_WORDS[width]) * moves).view(torch.uint8)[..., per_byte - 1 :: per_byte].contiguous()


def unpack(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """The inverse of ``pack``: uint8 [..., packed_size] → uint8 [..., count].

    Raises:
        PayloadError: bits after the last integer are set. A value has one spelling only.
    """
    words = _codes_of_a_byte(width, packed.device).index_select(0, packed.reshape(-1).int())
    codes = words.view(packed.shape).view(torch.uint8)
    if codes[..., count:].any():
        raise PayloadError(f"bits are set after the last of {count} packed integers")
    return codes[..., :count]


def reaching(magnitudes: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Where of [rows, n], flattened, entries are not below their row's bound ([rows, 1]): int64, ascending."""
    if magnitudes.device.type == "cpu":
        # A third of the time of torch's comparison with a number for each row.
        return torch.from_numpy(np.flatnonzero(magnitudes.numpy() >= bounds.numpy()))
    return positions((magnitudes >= bounds).view(-1))


def below(magnitudes: torch.Tensor, bounds: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the entries of [rows, n], on a CPU, that are below their row's bound ([rows]).

    Most rows have none, and are passed over after one look at their smallest entry.
    """
    few = np.flatnonzero(magnitudes.amin(dim=1).numpy() < bounds.numpy())
    found = np.flatnonzero(magnitudes.numpy()[few] < bounds.numpy()[few, None])
    rows, columns = np.divmod(found, magnitudes.shape[1])
    return few[rows], columns


def positions(flags: torch.Tensor) -> torch.Tensor:
    """Where uint8 (0 or 1) or bool [count] is set: int64, ascending."""
    if flags.device.type == "cpu":
        # NumPy's search has no branches: on a bitmap that is half ones it takes a tenth of torch's time.
        return torch.from_numpy(np.flatnonzero(flags.view(torch.bool).numpy()))
    return flags.nonzero().squeeze(1)


@functools.lru_cache(maxsize=16)
def _codes_of_a_byte(width: int, device: torch.device) -> torch.Tensor:
    """A word for each byte that holds its codes one by one: a look-up is eight times faster than shifts."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    codes = (torch.arange(256, dtype=torch.uint8)[:, None] >> shifts) & (2**width - 1)
    return codes.view(_WORDS[width]).view(256).to(device)

"""Small integers ↔ packed bytes, the first one in the lowest bits of the first byte."""

import torch

from tplr.errors import PayloadError


def packed_size(count: int, width: int) -> int:
    """Bytes of ``count`` integers of ``width`` bits."""
    return (count * width + 7) // 8


def pack(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Uint8 or bool [count], each below ``2**width`` → uint8 [packed_size]; ``width`` is 1, 2, 4 or 8."""
    per_byte = 8 // width
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, -len(codes) % per_byte)).view(-1, per_byte)
    packed = padded[:, 0].clone()
    for place in range(1, per_byte):
        packed |= padded[:, place] << (place * width)
    return packed


def unpack(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """The inverse of ``pack``: uint8 [packed_size] → uint8 [count].

    Raises:
        PayloadError: bits after the last integer are set. A value has one spelling only.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    codes = ((packed[:, None] >> shifts) & (2**width - 1)).view(-1)
    if codes[count:].any():
        raise PayloadError(f"bits are set after the last of {count} packed integers")
    return codes[:count]

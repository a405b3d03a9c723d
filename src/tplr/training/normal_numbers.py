"""Normal numbers that are equal on every processor, for the first weights of a run.

PyTorch computes its own by logarithms and sines, whose last bits differ between processors (x86-64 with and without
AVX2, ARM). These need integer sums and one rounded product, which IEEE 754 defines to the bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tplr.errors import ConfigError

AT_ONCE = 1 << 16  # numbers computed at a time, so that they stay in a processor's cache
_LOW = np.uint64(0x0000_FFFF_0000_FFFF)  # the lower 16 bits of both halves of a word
_MEAN = 4 * 0xFFFF // 2  # of a sum of four numbers of 16 bits
_SCALE = np.float32(math.sqrt(3 / (2**32 - 1)))  # 1 / its standard deviation: each has a variance of (2^32 - 1) / 12


def normal_numbers(stream: np.random.PCG64, count: int) -> np.ndarray:
    """Return the stream's next ``count`` numbers of mean 0 and variance 1, float32; one 64-bit word for each.

    A number is the scaled sum of its word's four parts of 16 bits: an Irwin-Hall distribution, which is a normal one
    but for the tails (excess kurtosis -0.3, at most 3.46 standard deviations).
    """
    words = stream.random_raw(count)
    halves = (words & _LOW) + (words >> np.uint64(16) & _LOW)
    sums = (halves & np.uint64(0xFFFF_FFFF)) + (halves >> np.uint64(32))
    return (sums.astype(np.int32) - _MEAN).astype(np.float32) * _SCALE


class PortableNormal(TorchDispatchMode):
    """Within it, ``Tensor.normal_`` of CPU tensors takes ``normal_numbers`` of one PCG64 stream of NumPy's.

    PyTorch's generators are neither read nor changed.

    Raises:
        ConfigError: something random other than ``normal_`` is drawn within it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._stream = np.random.PCG64(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.normal_.default:
            return self._fill(*args)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ConfigError(f"first weights: the model draws by {func}; expected aten.normal_; use another model")
        return func(*args, **(kwargs or {}))

    def _fill(self, tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        flat = tensor.view(-1)
        for start in range(0, len(flat), AT_ONCE):
            part = flat[start : start + AT_ONCE]
            part.copy_(torch.from_numpy(normal_numbers(self._stream, len(part)) * np.float32(std) + np.float32(mean)))
        return tensor

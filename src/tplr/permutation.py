"""A random permutation of ``n`` indices in constant memory; each position is computed independently.

The rule, in 64-bit unsigned integers, so that results are equal on every machine: with ``a = ceil(sqrt(n))`` and
``b = ceil(n / a)``, an index ``x < a * b`` is the pair ``left = x mod a``, ``right = x div a``. Eight rounds of an
additive Feistel network transform the pair: rounds 0, 2, 4, 6 add ``f(right xor key)`` to ``left`` modulo ``a``, the
others add ``f(left xor key)`` to ``right`` modulo ``b``. ``f`` maps the upper 32 bits of ``mix`` to the range by
multiplication; ``mix`` is splitmix64's finalizer. A result of ``n`` or above is transformed again ("cycle walking");
fewer than one in ``sqrt(n)`` is. The key of round ``r`` is ``seeds.derive("permutation", n, seed, epoch, r)``.

Sources: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), methods 2 and 3; Steele, Lea and Flood,
"Fast Splittable Pseudorandom Number Generators" (2014), with the constants of Stafford's variant 13.
"""

import math
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from tplr.seeds import derive

ROUNDS = 8
MAX_LENGTH = 1 << 62
_M64 = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BLOCK = 1 << 16  # indices per block: temporaries fit the cache, and memory does not grow with the array


class Permutation:
    """The indices ``0 .. length - 1`` in an order determined by ``seed`` and ``epoch``.

    ``permutation[i]`` is the index at position ``i``; ``permutation.take(places)`` does the same for an array.

    Raises:
        ValueError: ``length`` is not in ``[0, 2**62]``.
    """

    def __init__(self, length: int, seed: int | str, epoch: int = 0) -> None:
        length = operator.index(length)  # integers of numpy would overflow
        if not 0 <= length <= MAX_LENGTH:
            raise ValueError(f"a permutation's length: expected 0 to 2**62, got {length}")
        self._length = length
        self._a = math.isqrt(max(length, 1) - 1) + 1
        self._b = -(-length // self._a)
        self._keys = [derive("permutation", length, seed, epoch, number) for number in range(ROUNDS)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> int:
        """Return the index at a position. Raises IndexError outside ``[-length, length)``."""
        if not -self._length <= place < self._length:
            raise IndexError(f"place {place} of a permutation of {self._length}")
        index = operator.index(place) % self._length
        while True:
            right, left = divmod(index, self._a)
            for number in range(0, ROUNDS, 2):
                left = (left + (_mix(right ^ self._keys[number]) >> 32) * self._a // 2**32) % self._a
                right = (right + (_mix(left ^ self._keys[number + 1]) >> 32) * self._b // 2**32) % self._b
            index = right * self._a + left
            if index < self._length:
                return index

    def take(self, places: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the int64 indices at positions ``places``, in its shape. Raises IndexError outside ``[0, length)``."""
        asked: npt.NDArray[Any] = np.asarray(places)
        if asked.size and not 0 <= int(asked.min()) <= int(asked.max()) < self._length:
            raise IndexError(f"places {asked.min()} to {asked.max()} of a permutation of {self._length}")
        flat = asked.astype(np.uint64).reshape(-1)
        for start in range(0, len(flat), _BLOCK):
            block = self._rounds(flat[start : start + _BLOCK])
            while len(outside := np.flatnonzero(block >= self._length)):
                block[outside] = self._rounds(block[outside])
            flat[start : start + _BLOCK] = block
        return flat.astype(np.int64).reshape(asked.shape)

    def _rounds(self, index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        a, b = np.uint64(self._a), np.uint64(self._b)
        right, left = np.divmod(index, a)
        for number in range(0, ROUNDS, 2):
            left = _wrapped(left + _spread(right, self._keys[number], a), a)
            right = _wrapped(right + _spread(left, self._keys[number + 1], b), b)
        return right * a + left


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * _FIRST & _M64
    z = (z ^ z >> 27) * _SECOND & _M64
    return z ^ z >> 31


def _spread(half: npt.NDArray[np.uint64], key: int, size: np.uint64) -> npt.NDArray[np.uint64]:
    z = half ^ np.uint64(key)
    z = (z ^ z >> np.uint64(30)) * np.uint64(_FIRST)
    z = (z ^ z >> np.uint64(27)) * np.uint64(_SECOND)
    return ((z ^ z >> np.uint64(31)) >> np.uint64(32)) * size >> np.uint64(32)


def _wrapped(value: npt.NDArray[np.uint64], size: np.uint64) -> npt.NDArray[np.uint64]:
    """Return ``value mod size`` for values below ``2 * size``; below ``size``, the difference wraps to a huge value."""
    return np.minimum(value, value - size)

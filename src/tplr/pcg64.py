"""A random stream that is equal on every machine, in plain integers.

Its values are those of ``numpy.random.default_rng(seed)``: SeedSequence, PCG64 (XSL-RR), Lemire's bounded integers.
numpy guarantees equal streams only between equal builds (NEP 19), and the pages that a node trains on must not depend
on its build. Sources: O'Neill, "PCG" (2014); Lemire, "Fast random integer generation in an interval"
(2019); numpy/random/bit_generator.pyx and src/distributions/distributions.c.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_M32 = (1 << 32) - 1
_M64 = (1 << 64) - 1
_M128 = (1 << 128) - 1
_PCG_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645


class PCG64Stream:
    """The stream of ``seed``, a non-negative integer of any size."""

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"a stream's seed is not negative, got {seed}")
        words = _seed_words(seed, 8)
        start_high, start_low, stream_high, stream_low = (
            low | high << 32 for low, high in zip(words[::2], words[1::2], strict=True)
        )
        self._increment = (((stream_high << 64 | stream_low) << 1) | 1) & _M128
        self._state = (self._increment + (start_high << 64 | start_low)) & _M128
        self._step()
        self._half: int | None = None  # upper half of a 64-bit word whose lower half was returned

    def advance(self, words: int) -> "PCG64Stream":
        """Skip ``words`` 64-bit words in O(log words), and drop a buffered half word. Returns the stream itself."""
        multiplier, increment = _PCG_MULTIPLIER, self._increment
        total_multiplier, total_increment = 1, 0
        words &= _M128
        while words:
            if words & 1:
                total_multiplier = total_multiplier * multiplier & _M128
                total_increment = (total_increment * multiplier + increment) & _M128
            increment = (multiplier + 1) * increment & _M128
            multiplier = multiplier * multiplier & _M128
            words >>= 1
        self._state = (total_multiplier * self._state + total_increment) & _M128
        self._half = None
        return self

    def integers(self, low: int, high: int) -> int:
        """Return a uniform integer in ``[low, high)``; a range of one integer uses no random bits.

        Raises:
            ValueError: the range is empty, or has more than 2**64 integers.
        """
        span = high - low
        if not 0 < span <= 1 << 64:
            raise ValueError(f"integers({low}, {high}): expected 1 to 2**64 integers in the range")
        if span == 1:
            return low
        bits, word = (32, self._next32) if span <= 1 << 32 else (64, self._next64)
        # Lemire: the product's upper half is uniform if values with a lower half below `surplus` are rejected.
        surplus = (1 << bits) % span
        while (product := word() * span) & ((1 << bits) - 1) < surplus:
            pass
        return low + (product >> bits)

    def random(self) -> float:
        """Return a uniform float in ``[0, 1)`` with 53 random bits."""
        return (self._next64() >> 11) * 2.0**-53

    def choice(self, items: Sequence[T]) -> T:
        """Return one item, chosen uniformly."""
        return items[self.integers(0, len(items))]

    def weighted_sample(self, items: Sequence[T], weights: Sequence[float], count: int) -> list[T]:
        """Sample ``count`` different items of positive weight (all, if fewer), one by one in proportion to weight.

        Sums are in the order of ``items`` and in double precision, so the samples are equal on every machine.
        """
        pool = [(item, weight) for item, weight in zip(items, weights, strict=True) if weight > 0]
        picked: list[T] = []
        while pool and len(picked) < count:
            point = self.random() * sum(weight for _, weight in pool)
            index = 0
            while index < len(pool) - 1 and point >= pool[index][1]:
                point -= pool[index][1]
                index += 1
            picked.append(pool.pop(index)[0])
        return picked

    def _step(self) -> None:
        self._state = (self._state * _PCG_MULTIPLIER + self._increment) & _M128

    def _next64(self) -> int:
        self._step()
        folded = (self._state >> 64) ^ (self._state & _M64)
        turn = self._state >> 122
        return (folded >> turn | folded << (64 - turn)) & _M64

    def _next32(self) -> int:
        if self._half is not None:
            word, self._half = self._half, None
            return word
        word = self._next64()
        self._half = word >> 32
        return word & _M32


def _seed_words(seed: int, count: int) -> list[int]:
    """Return the 32-bit words of ``numpy.random.SeedSequence(seed).generate_state(count)``."""
    entropy = [seed >> shift & _M32 for shift in range(0, max(seed.bit_length(), 1), 32)]
    constant = 0x43B0D7E5

    def scramble(value: int) -> int:
        nonlocal constant
        value ^= constant
        constant = constant * 0x931E8875 & _M32
        value = value * constant & _M32
        return value ^ value >> 16

    def mix(x: int, y: int) -> int:
        value = (x * 0xCA01F9DD - y * 0x4973F715) & _M32
        return value ^ value >> 16

    pool = [scramble(word) for word in (entropy + [0] * 4)[:4]]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = mix(pool[target], scramble(pool[source]))
    for word in entropy[4:]:
        for target in range(4):
            pool[target] = mix(pool[target], scramble(word))

    words = []
    constant = 0x8B51F9DD
    for i in range(count):
        value = pool[i % 4] ^ constant
        constant = constant * 0x58F38DED & _M32
        value = value * constant & _M32
        words.append(value ^ value >> 16)
    return words

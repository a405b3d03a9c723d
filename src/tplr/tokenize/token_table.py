"""Hash table from pre-tokens to token ids, in arrays: one call looks up thousands of pre-tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tplr.concurrency.fork_lock import ForkLock
from tplr.tokenize.pretokenize import PreTokens
from tplr.tokenize.ragged import Ids, Ragged, offsets_of

SLOT_BITS = 19
_PROBES = 4  # consecutive slots that may hold a pre-token
_KEY_BYTES = 15  # longer pre-tokens are in a dictionary
_OTHERS_KEPT, _OTHERS_BYTES = 2**16, 128  # entries of the dictionary, and longest pre-token that is kept
_POOL = 2**22  # ids of all pre-tokens in a table
_POOL_RESERVE = 2**12  # a table with less room in its pool is full
_TOKEN_SHARE = 8  # a new table is filled to 1/8 with the tokenizer's tokens

_U64 = npt.NDArray[np.uint64]
_I64 = npt.NDArray[np.int64]
_LENGTHS = range(_KEY_BYTES + 2)  # bytes of a pre-token; the last entry is for all longer ones
_LOW_MASKS: _U64 = np.array([(1 << 8 * min(size, 8)) - 1 for size in _LENGTHS], np.uint64)
_HIGH_MASKS: _U64 = np.array([(1 << 8 * min(max(size - 8, 0), 7)) - 1 for size in _LENGTHS], np.uint64)
_TOPS: _U64 = np.array([size << 56 for size in _LENGTHS], np.uint64)
_LOW_FACTOR, _HIGH_FACTOR = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)  # two primes of xxHash64
_COUNT_BITS = 32


class TokenTable:
    """Looks up the ids of pre-tokens, and calls ``encode_one`` for those not in the table. Threads may share one.

    Its size is bounded: a full table is dropped and a new one begun.

    Args:
        encode_one: the bytes of a pre-token -> its ids.
        tokens, ids: pre-tokens with one id each, most frequent first, which a new table holds from the beginning.
    """

    def __init__(
        self, encode_one: Callable[[bytes], Sequence[int]], tokens: Sequence[bytes], ids: Sequence[int]
    ) -> None:
        self._encode_one = encode_one
        self._tokens, self._ids = tokens, ids
        self._table = self._new_table()
        self._lock = ForkLock()

    def _new_table(self) -> "_Table":
        """A table with the tokenizer's tokens: most words of a text are among them."""
        table, tokens = _Table(), self._tokens[: (1 << SLOT_BITS) // _TOKEN_SHARE]
        ends = offsets_of([len(token) for token in tokens])
        low, high = _keys(PreTokens(b"".join(tokens), ends[:-1], ends[1:], ends[:0]))
        keys = zip(low.tolist(), high.tolist(), _slots(low, high).tolist(), strict=True)
        for token, number, key in zip(tokens, self._ids[: len(tokens)], keys, strict=True):
            table.keep(token, [number], *key)
        return table

    def encode(self, pre_tokens: PreTokens) -> Ragged:
        """The ids of each text."""
        low, high = _keys(pre_tokens)
        slots = _slots(low, high)
        table = self._table
        values = table.find(low, high, slots)
        values[pre_tokens.separators] = 0
        not_kept: dict[int, Sequence[int]] = {}
        unknown = np.flatnonzero(values < 0)
        if len(unknown):
            values[unknown] = [table.others.get(one, -1) for one in _bytes_of(pre_tokens, unknown)]
            unknown = unknown[values[unknown] < 0]
        if len(unknown):
            keys = zip(low[unknown].tolist(), high[unknown].tolist(), slots[unknown].tolist(), strict=True)
            with self._lock:
                if table is self._table and table.is_full():
                    self._table = self._new_table()
                for i, one, key in zip(unknown.tolist(), _bytes_of(pre_tokens, unknown), keys, strict=True):
                    value = table.get(one, *key)
                    if value is None:
                        ids = self._encode_one(one)
                        value = table.keep(one, ids, *key)
                        if value is None:
                            not_kept[i], value = ids, len(ids)
                    values[i] = value
        counts = values & (1 << _COUNT_BITS) - 1
        ends = np.cumsum(counts)
        index = np.repeat((values >> _COUNT_BITS) - (ends - counts), counts)
        index += np.arange(len(index))
        ids = table.pool.take(index, mode="clip")  # indices of rows in ``not_kept`` mean nothing
        for i, row in not_kept.items():
            ids[ends[i] - len(row) : ends[i]] = row
        return Ragged(ids, np.concatenate([np.zeros(1, np.int64), ends[pre_tokens.separators]]))


class _Table:
    """The slots. A slot is written once and holds no 0 then, so reading needs no lock while another thread writes.

    Attributes:
        slots: uint64 (slots, 4): the two keys of a pre-token, its value (offset of its ids in ``pool``, and their
            number in the lowest 32 bits), and an unused number. A slot is half a cache line, and read at once.
        cells: flat view of ``slots``, of which Python reads single numbers much faster than from the array.
        others: values of the pre-tokens that are in no slot.
    """

    def __init__(self) -> None:
        self.slots = np.zeros(((1 << SLOT_BITS) + _PROBES, 4), np.uint64)
        self.cells = self.slots.reshape(-1).data
        self.pool: Ids = np.zeros(_POOL, np.int32)
        self.pooled = 0
        self.filled = 0
        self.others: dict[bytes, int] = {}

    def is_full(self) -> bool:
        return 2 * self.filled > 1 << SLOT_BITS or self.pooled > _POOL - _POOL_RESERVE

    def find(self, low: _U64, high: _U64, slots: _I64) -> _I64:
        """The value of each pre-token, or -1."""
        values, left = self._read(low, high, slots)
        for probe in range(1, _PROBES):
            if not len(left):
                break
            found, still = self._read(low[left], high[left], slots[left] + probe)
            values[left] = found
            left = left[still]
        return values

    def _read(self, low: _U64, high: _U64, slots: _I64) -> tuple[_I64, _I64]:
        """The value of each pre-token that is in its slot, else -1; and the indices of the others."""
        there = self.slots.take(slots, axis=0, mode="clip")  # "clip" saves a copy
        values = there[:, 2].astype(np.int64)
        left = np.flatnonzero((there[:, 0] != low) | (there[:, 1] != high) | (values == 0))
        values[left] = -1
        return values, left

    def get(self, pre_token: bytes, low: int, high: int, slot: int) -> int | None:
        """The value of one pre-token, in a slot or not; None if it is not kept."""
        if len(pre_token) <= _KEY_BYTES:
            for at in range(4 * slot, 4 * (slot + _PROBES), 4):
                # Without a value, the slot was half written when this process was forked.
                if self.cells[at] == low and self.cells[at + 1] == high and self.cells[at + 2]:
                    return self.cells[at + 2]
        return self.others.get(pre_token)

    def keep(self, pre_token: bytes, ids: Sequence[int], low: int, high: int, slot: int) -> int | None:
        """Stores the ids of a new pre-token. Returns their value, or None if there is no room for them."""
        if len(pre_token) > _OTHERS_BYTES or self.pooled + len(ids) > _POOL:
            return None
        value = self.pooled << _COUNT_BITS | len(ids)
        self.pool[self.pooled : self.pooled + len(ids)] = ids
        self.pooled += len(ids)
        if len(pre_token) <= _KEY_BYTES:
            for at in range(4 * slot, 4 * (slot + _PROBES), 4):
                if not self.cells[at]:
                    self.cells[at], self.cells[at + 1], self.cells[at + 2] = low, high, value
                    self.filled += 1
                    return value
        if len(self.others) >= _OTHERS_KEPT:
            self.others.clear()
        self.others[pre_token] = value
        return value


def _keys(pre_tokens: PreTokens) -> tuple[_U64, _U64]:
    """Two numbers for each pre-token: its first 8 bytes plus 1, and the next 7 bytes with its length above them.

    Two pre-tokens of up to 15 bytes have the same numbers if and only if they are equal. Longer ones have length 16, so
    they never equal a key in the table.
    """
    lengths = pre_tokens.ends - pre_tokens.starts
    padded = np.frombuffer(pre_tokens.data + bytes(16), np.uint8)
    at_every_byte = np.ndarray(len(pre_tokens.data) + 8, "<u8", padded.data, strides=(1,)).copy()
    low = at_every_byte.take(pre_tokens.starts, mode="clip") & _LOW_MASKS.take(lengths, mode="clip")
    low += np.uint64(1)  # never 0: eight bytes of UTF-8 are never all ones
    high = at_every_byte.take(pre_tokens.starts + 8, mode="clip") & _HIGH_MASKS.take(lengths, mode="clip")
    return low, high | _TOPS.take(lengths, mode="clip")


def _bytes_of(pre_tokens: PreTokens, which: _I64) -> list[bytes]:
    places = zip(pre_tokens.starts[which].tolist(), pre_tokens.ends[which].tolist(), strict=True)
    return [pre_tokens.data[start:end] for start, end in places]


def _slots(low: _U64, high: _U64) -> _I64:
    mixed = low * _LOW_FACTOR ^ high * _HIGH_FACTOR
    mixed ^= mixed >> np.uint64(29)
    return (mixed * _LOW_FACTOR >> np.uint64(64 - SLOT_BITS)).astype(np.int64)

"""Token ids of pieces of text met before: a hash table in arrays, asked for thousands of pieces at once."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tplr.data.tokens.pieces import Pieces
from tplr.data.tokens.ragged import Ids, Ragged, offsets_of

SLOT_BITS = 19
_PROBES = 4  # slots, from a piece's own on, that may hold it
_KEY_BYTES = 15  # longer pieces are in a dictionary
_OTHERS_KEPT, _OTHERS_BYTES = 2**16, 128
_POOL = 2**22  # ids of all pieces in a table
_MOST_IDS = 2**12
_KNOWN_SHARE = 8  # one of so many slots is for tokens

_U64 = npt.NDArray[np.uint64]
_I64 = npt.NDArray[np.int64]
_MASKS: _U64 = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)
_LOW_FACTOR, _HIGH_FACTOR = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)  # two primes of xxHash64
_COUNT_BITS = 32


class WordTable:
    """Ids of pieces, by ``encode_piece`` when a piece is met for the first time. Threads may share one.

    What it keeps is bounded: a table that is full is forgotten, and a new one begun.

    Args:
        encode_piece: the bytes of a piece -> its ids.
        tokens, ids: pieces with one id each, the most frequent ones first; a table begins with as many as leave room.
    """

    def __init__(self, encode_piece: Callable[[bytes], Ids], tokens: Sequence[bytes], ids: Ids) -> None:
        self._encode_piece = encode_piece
        self._tokens, self._ids = tokens, ids
        self._table = self._begun()
        self._lock = threading.Lock()

    def _begun(self) -> "_Table":
        """A new table: most words of a text are tokens, so little of it is met for the first time."""
        table, tokens = _Table(), self._tokens[: (1 << SLOT_BITS) // _KNOWN_SHARE]
        ends = offsets_of([len(token) for token in tokens])
        low, high = _keys(Pieces(b"".join(tokens), ends[:-1], ends[1:], ends[:0]))
        keys = zip(low.tolist(), high.tolist(), _slots(low, high).tolist(), strict=True)
        for i, (token, key) in enumerate(zip(tokens, keys, strict=True)):
            table.keep(token, self._ids[i : i + 1], *key)
        return table

    def encode(self, pieces: Pieces) -> Ragged:
        """A row for each text."""
        low, high = _keys(pieces)
        slots = _slots(low, high)
        table = self._table
        values = table.find(low, high, slots)
        values[pieces.separators] = 0
        unknown = np.flatnonzero(values < 0)
        apart: dict[int, Ids] = {}
        if len(unknown):
            with self._lock:
                if table is self._table and table.is_full():
                    self._table = self._begun()
                for i in unknown.tolist():
                    piece = pieces.data[pieces.starts[i] : pieces.ends[i]]
                    key = int(low[i]), int(high[i]), int(slots[i])
                    value = table.get(piece, *key)
                    if value is None:
                        ids = self._encode_piece(piece)
                        value = table.keep(piece, ids, *key)
                        if value is None:
                            apart[i], value = ids, len(ids)
                    values[i] = value
        counts = values & (1 << _COUNT_BITS) - 1
        ends = np.cumsum(counts)
        index = np.repeat((values >> _COUNT_BITS) - (ends - counts), counts)
        index += np.arange(len(index))
        ids = table.pool.take(index, mode="clip")  # in whose place others come may point anywhere
        for i, row in apart.items():
            ids[ends[i] - len(row) : ends[i]] = row
        return Ragged(ids, np.concatenate([np.zeros(1, np.int64), ends[pieces.separators]]))


class _Table:
    """Slots fill and never change, each one's value before its key: who reads while another fills needs no lock."""

    def __init__(self) -> None:
        slots = (1 << SLOT_BITS) + _PROBES
        self.low = np.zeros(slots, np.uint64)
        self.high = np.zeros(slots, np.uint64)  # 0: empty
        self.values = np.zeros(slots, np.int64)  # where the ids are in the pool, and in the lowest bits how many
        self.pool: Ids = np.zeros(_POOL, np.int32)
        self.pooled = 0
        self.filled = 0
        self.others: dict[bytes, int] = {}

    def is_full(self) -> bool:
        return 2 * self.filled > 1 << SLOT_BITS or self.pooled > _POOL - _MOST_IDS

    def find(self, low: _U64, high: _U64, slots: _I64) -> _I64:
        """The value of each piece, or -1."""
        hit = (self.low[slots] == low) & (self.high[slots] == high)
        values = np.where(hit, self.values[slots], -1)
        left = np.flatnonzero(~hit)
        for probe in range(1, _PROBES):
            at = slots[left] + probe
            hit = (self.low[at] == low[left]) & (self.high[at] == high[left])
            values[left[hit]] = self.values[at[hit]]
            left = left[~hit]
        return values

    def get(self, piece: bytes, low: int, high: int, slot: int) -> int | None:
        """The value of one piece, as ``find``, also of those that are in no slot."""
        for at in range(slot, slot + _PROBES if len(piece) <= _KEY_BYTES else slot):
            if self.high[at] == high and self.low[at] == low:  # since ``find``: it occurs twice in these texts
                return int(self.values[at])
        return self.others.get(piece)

    def keep(self, piece: bytes, ids: Ids, low: int, high: int, slot: int) -> int | None:
        """The value that the ids of a new piece now have, or None if there is no room for them."""
        if len(piece) > _OTHERS_BYTES or self.pooled + len(ids) > _POOL:
            return None
        value = self.pooled << _COUNT_BITS | len(ids)
        self.pool[self.pooled : self.pooled + len(ids)] = ids
        self.pooled += len(ids)
        for at in range(slot, slot + _PROBES if len(piece) <= _KEY_BYTES else slot):
            if not self.high[at]:
                self.values[at], self.low[at], self.high[at] = value, low, high
                self.filled += 1
                return value
        if len(self.others) >= _OTHERS_KEPT:
            self.others.clear()
        self.others[piece] = value
        return value


def _keys(pieces: Pieces) -> tuple[_U64, _U64]:
    """Each piece as two numbers, its first 8 bytes, and the next 7 with its length on top; equal for equal pieces of
    up to 15 bytes only. A longer one is like none: its length does not fit, or is more than 15."""
    lengths = np.minimum(pieces.ends - pieces.starts, 255)
    padded = np.frombuffer(pieces.data + bytes(16), np.uint8)
    at_every_byte = np.ndarray(len(pieces.data) + 8, "<u8", padded.data, strides=(1,))
    low = at_every_byte[pieces.starts] & _MASKS[np.minimum(lengths, 8)]
    high = at_every_byte[pieces.starts + 8] & _MASKS[np.clip(lengths - 8, 0, 7)]
    return low, high | lengths.astype(np.uint64) << np.uint64(56)


def _slots(low: _U64, high: _U64) -> _I64:
    mixed = low * _LOW_FACTOR ^ high * _HIGH_FACTOR
    mixed ^= mixed >> np.uint64(29)
    return (mixed * _LOW_FACTOR >> np.uint64(64 - SLOT_BITS)).astype(np.int64)

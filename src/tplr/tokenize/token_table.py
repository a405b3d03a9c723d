"""Token ids of pieces of text met before: a hash table in arrays, asked for thousands of pieces at once."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tplr.tokenize.pretokenize import Pieces
from tplr.tokenize.ragged import Ids, Ragged, offsets_of

SLOT_BITS = 19
_PROBES = 4  # slots, from a piece's own on, that may hold it
_KEY_BYTES = 15  # longer pieces are in a dictionary
_OTHERS_KEPT, _OTHERS_BYTES = 2**16, 128
_POOL = 2**22  # ids of all pieces in a table
_MOST_IDS = 2**12
_KNOWN_SHARE = 8  # one of so many slots is for tokens

_U64 = npt.NDArray[np.uint64]
_I64 = npt.NDArray[np.int64]
_LENGTHS = range(_KEY_BYTES + 2)  # of pieces, the last for all that are longer
_LOW_MASKS: _U64 = np.array([(1 << 8 * min(size, 8)) - 1 for size in _LENGTHS], np.uint64)
_HIGH_MASKS: _U64 = np.array([(1 << 8 * min(max(size - 8, 0), 7)) - 1 for size in _LENGTHS], np.uint64)
_TOPS: _U64 = np.array([size << 56 for size in _LENGTHS], np.uint64)
_LOW_FACTOR, _HIGH_FACTOR = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)  # two primes of xxHash64
_COUNT_BITS = 32


class WordTable:
    """Ids of pieces, by ``encode_piece`` when a piece is met for the first time. Threads may share one.

    What it keeps is bounded: a table that is full is forgotten, and a new one begun.

    Args:
        encode_piece: the bytes of a piece -> its ids.
        tokens, ids: pieces with one id each, the most frequent ones first; a table begins with as many as leave room.
    """

    def __init__(
        self, encode_piece: Callable[[bytes], Sequence[int]], tokens: Sequence[bytes], ids: Sequence[int]
    ) -> None:
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
        for token, number, key in zip(tokens, self._ids[: len(tokens)], keys, strict=True):
            table.keep(token, [number], *key)
        return table

    def encode(self, pieces: Pieces) -> Ragged:
        """A row for each text."""
        low, high = _keys(pieces)
        slots = _slots(low, high)
        table = self._table
        values = table.find(low, high, slots)
        values[pieces.separators] = 0
        apart: dict[int, Sequence[int]] = {}
        unknown = np.flatnonzero(values < 0)
        if len(unknown):
            values[unknown] = [table.others.get(piece, -1) for piece in _cut_out(pieces, unknown)]
            unknown = unknown[values[unknown] < 0]
        if len(unknown):
            keys = zip(low[unknown].tolist(), high[unknown].tolist(), slots[unknown].tolist(), strict=True)
            with self._lock:
                if table is self._table and table.is_full():
                    self._table = self._begun()
                for i, piece, key in zip(unknown.tolist(), _cut_out(pieces, unknown), keys, strict=True):
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
    """Slots fill and never change, and none of a full one's numbers is 0: who reads while another fills needs no lock.

    Attributes:
        slots: uint64 (slots, 4): a piece's two numbers, and its value: where the ids are in the pool, and in the lowest
            bits how many. A slot is half a cache line, and read at once.
        cells: the numbers in ``slots`` one after another, for one at a time: Python has them far sooner than NumPy's.
    """

    def __init__(self) -> None:
        self.slots = np.zeros(((1 << SLOT_BITS) + _PROBES, 4), np.uint64)
        self.cells = self.slots.reshape(-1).data
        self.pool: Ids = np.zeros(_POOL, np.int32)
        self.pooled = 0
        self.filled = 0
        self.others: dict[bytes, int] = {}

    def is_full(self) -> bool:
        return 2 * self.filled > 1 << SLOT_BITS or self.pooled > _POOL - _MOST_IDS

    def find(self, low: _U64, high: _U64, slots: _I64) -> _I64:
        """The value of each piece, or -1."""
        values, left = self._read(low, high, slots)
        for probe in range(1, _PROBES):
            if not len(left):
                break
            found, still = self._read(low[left], high[left], slots[left] + probe)
            values[left] = found
            left = left[still]
        return values

    def _read(self, low: _U64, high: _U64, slots: _I64) -> tuple[_I64, _I64]:
        """The value of each piece if it is in its slot, else -1; and which are in none."""
        there = self.slots.take(slots, axis=0, mode="clip")  # without "clip", ``take`` copies more
        values = there[:, 2].astype(np.int64)
        left = np.flatnonzero((there[:, 0] != low) | (there[:, 1] != high) | (values == 0))
        values[left] = -1
        return values, left

    def get(self, piece: bytes, low: int, high: int, slot: int) -> int | None:
        """The value of one piece, as ``find``, also of those that are in no slot."""
        if len(piece) <= _KEY_BYTES:
            for at in range(4 * slot, 4 * (slot + _PROBES), 4):
                if self.cells[at] == low and self.cells[at + 1] == high:  # since ``find``: it is twice in these texts
                    return self.cells[at + 2]
        return self.others.get(piece)

    def keep(self, piece: bytes, ids: Sequence[int], low: int, high: int, slot: int) -> int | None:
        """The value that the ids of a new piece now have, or None if there is no room for them."""
        if len(piece) > _OTHERS_BYTES or self.pooled + len(ids) > _POOL:
            return None
        value = self.pooled << _COUNT_BITS | len(ids)
        self.pool[self.pooled : self.pooled + len(ids)] = ids
        self.pooled += len(ids)
        if len(piece) <= _KEY_BYTES:
            for at in range(4 * slot, 4 * (slot + _PROBES), 4):
                if not self.cells[at]:
                    self.cells[at], self.cells[at + 1], self.cells[at + 2] = low, high, value
                    self.filled += 1
                    return value
        if len(self.others) >= _OTHERS_KEPT:
            self.others.clear()
        self.others[piece] = value
        return value


def _keys(pieces: Pieces) -> tuple[_U64, _U64]:
    """Each piece as two numbers: its first 8 bytes, and 1; and the next 7 with its length on top. They are equal for
    equal pieces of up to 15 bytes only. A longer one is like none: its length is 16."""
    lengths = pieces.ends - pieces.starts
    padded = np.frombuffer(pieces.data + bytes(16), np.uint8)
    at_every_byte = np.ndarray(len(pieces.data) + 8, "<u8", padded.data, strides=(1,)).copy()
    low = at_every_byte.take(pieces.starts, mode="clip") & _LOW_MASKS.take(lengths, mode="clip")
    low += np.uint64(1)  # so never 0: no text has eight bytes of all ones
    high = at_every_byte.take(pieces.starts + 8, mode="clip") & _HIGH_MASKS.take(lengths, mode="clip")
    return low, high | _TOPS.take(lengths, mode="clip")


def _cut_out(pieces: Pieces, which: _I64) -> list[bytes]:
    places = zip(pieces.starts[which].tolist(), pieces.ends[which].tolist(), strict=True)
    return [pieces.data[start:end] for start, end in places]


def _slots(low: _U64, high: _U64) -> _I64:
    mixed = low * _LOW_FACTOR ^ high * _HIGH_FACTOR
    mixed ^= mixed >> np.uint64(29)
    return (mixed * _LOW_FACTOR >> np.uint64(64 - SLOT_BITS)).astype(np.int64)

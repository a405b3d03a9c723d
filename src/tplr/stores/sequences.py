"""Assigns sequences of a store to uids and windows, and reads them.

The rule: A store of ``T`` tokens has ``S = T // sequence_length`` sequences; sequence ``i`` is tokens
``[i * sequence_length, (i + 1) * sequence_length)``. A window has ``uids`` shares of ``samples_per_window`` sequences
each. An epoch has as many windows as the store has sequences for, and at least one. Epoch ``e`` begins with window
``e * windows``.

- The windows of an epoch take consecutive pools of ``uids * samples_per_window`` positions of
  ``Permutation(S, sha256 of the store, e)``: no sequence is used twice in an epoch.
- Within a window ``Permutation(pool, seed)`` assigns the pool: uid ``u`` gets the positions from
  ``u * samples_per_window`` on. So no two uids share a sequence. The assignment follows from the window's seed
  (``seeds.py``), which in profile ``hardened`` is unknown until one window before. Earlier, only the pool is known, and
  a share is one part in ``uids`` of it.
"""

import asyncio
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tplr.errors import DataError
from tplr.pcg64 import PCG64Stream
from tplr.permutation import Permutation
from tplr.stores.blocks import BlockReader
from tplr.stores.bucket import BucketStore
from tplr.stores.token_stream import token_ids

KEY = "sequence"


@dataclass(frozen=True, kw_only=True)
class SequenceAssignment:
    """Assigns a store's sequences to uids and windows; the rule is in the module's docstring.

    It differs from the sampler's and the pipelines' sharding: uids come and go, any window must be computable alone,
    and the assignment must stay unknown until the window's seed is known.

    Attributes:
        sequences: number of sequences.
        order: seed of an epoch's order.

    Raises:
        DataError: the store has fewer sequences than one window needs.
    """

    sequences: int
    order: str
    samples_per_window: int
    uids: int

    def __post_init__(self) -> None:
        if self.sequences < self._pool:
            raise DataError(
                f"the store has {self.sequences} sequences, a window of {self.uids} uids with "
                f"{self.samples_per_window} each takes {self._pool}: use a larger store, or lower store.uids or "
                "store.samples_per_window"
            )

    @property
    def _pool(self) -> int:
        return self.uids * self.samples_per_window

    @property
    def windows(self) -> int:
        """Windows of an epoch."""
        return self.sequences // self._pool

    def of(self, uid: int, window: int, seed: int) -> list[int]:
        """The sequences of ``uid`` in ``window``, in the order of training; none for a uid that is not below ``uids``.

        Args:
            seed: the window's seed.
        """
        if uid >= self.uids:
            return []
        epoch, number = divmod(window, self.windows)
        share = uid * self.samples_per_window + np.arange(self.samples_per_window)
        assigned = Permutation(self._pool, seed).take(share)
        return Permutation(self.sequences, self.order, epoch).take(number * self._pool + assigned).tolist()

    def held_out(self, seed: int, taken: Collection[int]) -> list[int]:
        """Return ``samples_per_window`` different sequences outside ``taken``, drawn by ``seed``.

        Raises:
            DataError: there are not enough sequences.
        """
        taken = set(taken)
        if self.sequences - len(taken) < self.samples_per_window:
            raise DataError(
                f"only {self.sequences - len(taken)} sequences are not assigned to the peers under evaluation"
            )
        draw, found = PCG64Stream(seed), list[int]()
        while len(found) < self.samples_per_window:
            sequence = draw.integers(0, self.sequences)
            if sequence not in taken:
                found.append(sequence)
                taken.add(sequence)
        return found


def samples_digest(sequences: Sequence[int], store_sha256: str, sequence_length: int) -> str:
    """Hex SHA-256 of ``samples``, the store's hash, the length, and each sequence's number, joined by commas.

    Not ``seeds.hash_parts``: updates publish this digest, so its bytes never change. No part holds a comma.
    """
    parts = ("samples", store_sha256, sequence_length, *sequences)
    return hashlib.sha256(",".join(map(str, parts)).encode()).hexdigest()


class SampleReader:
    """Reads sequences of a store in a bucket, on the event loop.

    Args:
        vocab_size: token ids are below it.

    Raises:
        DataError: the store has no key ``sequence``.
    """

    def __init__(self, store: BucketStore, reader: BlockReader, *, sequence_length: int, vocab_size: int) -> None:
        if KEY not in store.keys:
            raise DataError(f"the store has no key {KEY!r}, only {', '.join(store.keys)}: prepare it from sections")
        self.sequences = len(store.stream(KEY)) // sequence_length
        self.sha256 = store.sha256
        self._store, self._reader = store, reader
        self._length, self._vocab_size = sequence_length, vocab_size

    async def read(self, sequences: Sequence[int]) -> npt.NDArray[np.int64]:
        """Token ids, int64 ``(len(sequences), sequence_length)``.

        Raises:
            DataError: the bytes contradict the store's meta, or an id is outside the vocabulary.
            StoreError: the bucket can't be read.
        """
        ranges = [(number * self._length, (number + 1) * self._length) for number in sequences]
        await self._reader.prefetch([place for wanted in ranges for place in self._store.places(KEY, *wanted)])
        stream = self._store.stream(KEY)
        rows = await asyncio.to_thread(
            lambda: np.stack([token_ids(stream.read(*wanted), KEY, wanted[0] // self._length) for wanted in ranges])
        )
        if rows.min() < 0 or rows.max() >= self._vocab_size:
            raise DataError(
                f"the store holds token ids from {rows.min()} to {rows.max()}, model.vocab_size is {self._vocab_size}: "
                "it was prepared with another tokenizer"
            )
        return rows

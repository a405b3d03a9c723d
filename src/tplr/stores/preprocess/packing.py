"""Plans which documents, or parts of them, are packed into one sequence; one plan serves every key of a document.

Best-fit decreasing: places documents by falling length, each into the sequence with the least sufficient room. It uses
at most 11/9 of the fewest sequences possible, plus one (D. S. Johnson, "Near-optimal bin packing algorithms", 1973).

``TokenBuffer``, which cuts tokens everywhere else, takes them in input order. A plan needs all documents of a shard
first and reorders them, so the two share no code.
"""

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tplr.stores.preprocess.columns import Indices, cuts, slices
from tplr.stores.preprocess.config import Packing, PositionIds, Truncation
from tplr.stores.writer import Column


@dataclass(frozen=True)
class PackingPlan:
    """The parts of documents in the order of the output.

    Attributes:
        starts, lengths: of each part, in the column of documents.
        sequences: index of each packed sequence's first part, then the number of parts.
        cut: number of tokens that are in no part.
    """

    starts: Indices
    lengths: Indices
    sequences: Indices
    cut: int

    def apply(self, documents: Column) -> Column:
        """One key of the documents in the order of the plan; a record is a packed sequence."""
        return Column(slices(documents.values, self.starts, self.lengths), cuts(self.lengths)[self.sequences])

    def positions(self, mode: PositionIds, *, one_sequence: bool) -> npt.NDArray[np.int32]:
        """Position ids of all tokens, from 0 in each part (``doc_reset``) or each sequence (``continuous``).

        Args:
            one_sequence: all parts form one sequence.
        """
        lengths = self.lengths
        if mode == "continuous":
            begins = cuts(lengths)
            lengths = np.diff(begins[[0, -1]] if one_sequence else begins[self.sequences])
        # A shard that int32 can't count would be 8 GB of tokens.
        longest = np.arange(lengths.max(initial=0), dtype=np.int32)
        return slices(longest, np.zeros_like(lengths), lengths)


def plan(offsets: Indices, strategy: Packing, capacity: int, truncation: Truncation) -> PackingPlan:
    """Plan the documents that begin at ``offsets``; a packed sequence has at most ``capacity`` tokens."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    total = int(lengths.sum())
    if strategy == "bfd_split":
        pieces = -(-lengths // capacity)
        number = np.arange(pieces.sum()) - np.repeat(cuts(pieces)[:-1], pieces)
        starts = np.repeat(starts, pieces) + number * capacity
        lengths = np.minimum(np.repeat(lengths, pieces) - number * capacity, capacity)
    elif truncation == "keep_end":
        starts, lengths = starts + np.maximum(lengths - capacity, 0), np.minimum(lengths, capacity)
    else:
        lengths = np.minimum(lengths, capacity)
    sequences = np.arange(len(lengths) + 1)
    if strategy != "simple":
        bins = best_fit_decreasing(lengths, capacity)
        order = np.array([piece for one in bins for piece in one], np.int64)
        starts, lengths, sequences = starts[order], lengths[order], cuts(map(len, bins))
    return PackingPlan(starts, lengths, sequences, total - int(lengths.sum()))


def best_fit_decreasing(lengths: Indices, capacity: int) -> list[list[int]]:
    """Bins of the indices of ``lengths``, none of which is above ``capacity``.

    Ties: of equal lengths the first is placed first; of bins with equal room the oldest is filled.
    """
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # heaps of bins, by the room they have left
    rooms = 0  # bit r is set where by_room[r] is not empty
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = heapq.heappop(by_room[room])
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        heapq.heappush(by_room[room - length], chosen)
        rooms |= 1 << (room - length)
    return bins

"""Packing against brute force: every plan holds its limits, and best fit is optimal at each step."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.stores.preprocess.columns import column, cuts, join, take
from tplr.stores.preprocess.packing import best_fit_decreasing, plan
from tplr.stores.writer import Column

LENGTHS = st.lists(st.integers(0, 12), max_size=12)


@given(lengths=LENGTHS.map(lambda lengths: [min(length, 7) for length in lengths]), capacity=st.integers(7, 9))
@settings(max_examples=100)
def test_best_fit_decreasing(lengths: list[int], capacity: int) -> None:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rooms = [capacity - sum(lengths[i] for i in one) for one in bins]
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= lengths[index]]
        if fitting:
            bins[min(fitting)[1]].append(index)
        else:
            bins.append([index])
    assert best_fit_decreasing(np.array(lengths, np.int64), capacity) == bins


@given(
    lengths=LENGTHS,
    strategy=st.sampled_from(["simple", "bfd", "bfd_split"]),
    truncation=st.sampled_from(["keep_start", "keep_end"]),
    capacity=st.integers(1, 10),
)
@settings(max_examples=150)
def test_plans_keep_tokens_together_and_count_what_they_drop(lengths, strategy, truncation, capacity) -> None:
    offsets = cuts(lengths)
    documents = [np.arange(100 * i, 100 * i + length) for i, length in enumerate(lengths)]
    tokens = column([[row] for row in documents], nested=False, dtype="int64")
    layout = plan(offsets, strategy, capacity, truncation)
    packed, same = layout.apply(tokens), layout.apply(Column(tokens.values + 1000, tokens.offsets))
    assert (same.values == packed.values + 1000).all()  # one plan for every key

    sequences = [packed.values[a:b].tolist() for a, b in zip(packed.offsets, packed.offsets[1:], strict=False)]
    assert sum(map(len, sequences)) + layout.cut == sum(lengths)
    assert all(len(sequence) <= capacity for sequence in sequences)
    kept = [row[-capacity:] if truncation == "keep_end" else row[:capacity] for row in documents]
    if strategy == "bfd_split":
        assert layout.cut == 0
        kept = documents
    assert sorted(packed.values) == sorted(token for row in kept for token in row.tolist())
    if strategy == "simple":
        assert sequences == [row.tolist() for row in kept]

    # Positions: one more than the token before it, from 0 where a document, or a piece of it, begins.
    reset = layout.positions("doc_reset", one_sequence=strategy == "simple")
    starts = [i for i, at in enumerate(reset) if at == 0]
    for begin, end in pairwise([*starts, len(reset)]):
        piece = packed.values[begin:end]
        assert reset[begin:end].tolist() == [*range(end - begin)]
        assert (piece == np.arange(piece[0], piece[0] + len(piece))).all()
    running = layout.positions("continuous", one_sequence=strategy == "simple")
    if strategy == "simple":
        assert running.tolist() == [*range(len(packed.values))]
    else:
        assert running.tolist() == [i for sequence in sequences for i in range(len(sequence))]


def test_the_documented_split() -> None:
    layout = plan(cuts([25, 3]), "bfd_split", 10, "keep_start")
    assert (layout.cut, layout.lengths.tolist(), np.diff(layout.sequences).tolist()) == (0, [10, 10, 5, 3], [1, 1, 2])


def test_many_tiny_documents_are_packed_in_no_time() -> None:
    bins = best_fit_decreasing(np.full(100_000, 3), 1000)
    assert len(bins) == -(-100_000 // 333)


@given(
    records=st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3), min_size=1, max_size=6),
    chosen=st.lists(st.integers(0, 5), max_size=6),
    cut=st.integers(0, 6),
)
@settings(max_examples=60)
def test_columns_are_joined_and_taken_apart(records, chosen, cut) -> None:
    def made(rows) -> Column:
        return column([[np.array(part) for part in row] for row in rows], nested=True, dtype="int32")

    def lists(source: Column) -> list[list[list[int]]]:
        parts = [source.values[a:b].tolist() for a, b in zip(source.offsets, source.offsets[1:], strict=False)]
        assert source.groups is not None
        return [parts[a:b] for a, b in zip(source.groups, source.groups[1:], strict=False)]

    assert lists(join([made(records[:cut]), made(records[cut:])])) == records
    indices = [i for i in chosen if i < len(records)]
    assert lists(take(made(records), np.array(indices, np.int64))) == [records[i] for i in indices]


@pytest.mark.parametrize("strategy", ["simple", "bfd", "bfd_split"])
def test_nothing_to_pack(strategy) -> None:
    layout = plan(cuts([]), strategy, 4, "keep_start")
    assert (layout.cut, len(layout.lengths), layout.sequences.tolist()) == (0, 0, [0])

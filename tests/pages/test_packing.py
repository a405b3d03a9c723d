"""Rows become documents; batches are compared with the documented loader's own procedure, written with lists."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.pages.packing import batches, packed, padded
from tplr.tokenize import Ragged

EOS = 0
# Documents of every kind: empty, only EOS, EOS inside, and (a foreign tokenizer) without one at the end.
DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=12)


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=6))
def test_each_row_is_ended_once_and_empty_ones_are_left_out(rows):
    expected = [row if row[-1] == EOS else [*row, EOS] for row in rows if row]
    stream = packed(Ragged.of(rows), EOS)
    assert stream.tolist() == [*chain(*expected)]
    assert stream.dtype == np.int32


def documented(documents: list[list[int]], batch_size: int, length: int, *, packed: bool) -> list[np.ndarray]:
    """Cut at each EOS, drop it, append ``pad_size`` EOS; return full batches from the front."""
    buffer = [token for document in documents for token in document]
    padded: list[int] = []
    while buffer:
        if EOS not in buffer:
            padded += buffer
            break
        end = buffer.index(EOS)
        document, buffer = buffer[:end], buffer[end + 1 :]
        padded += document + [EOS] * (1 if packed else -len(document) % length)
    size = batch_size * length
    return [np.array(padded[i : i + size]).reshape(batch_size, length) for i in range(0, len(padded) - size + 1, size)]


@settings(max_examples=300)
@given(documents=DOCUMENTS, batch_size=st.integers(1, 3), length=st.integers(1, 5))
@pytest.mark.parametrize("packed", [True, False])
def test_batches_are_the_documented_ones(packed, documents, batch_size, length):
    stream = np.array([token for document in documents for token in document], dtype=np.int32)
    ours = batches(stream if packed else padded(stream, length, EOS), batch_size, length)
    expected = documented(documents, batch_size, length, packed=packed)
    assert ours.shape == (len(expected), batch_size, length)
    assert ours.dtype == np.int64
    assert all(np.array_equal(a, b) for a, b in zip(ours, expected, strict=True))


@settings(max_examples=100)
@given(documents=DOCUMENTS, length=st.integers(1, 5), cut=st.integers(0, 12))
def test_pages_can_be_padded_one_by_one(documents, length, cut):
    ended = [[*(token for token in document if token != EOS), EOS] for document in documents]
    first, second = (np.array([*chain(*part)], dtype=np.int32) for part in (ended[:cut], ended[cut:]))
    whole = padded(np.concatenate([first, second]), length, EOS)
    assert np.array_equal(whole, np.concatenate([padded(first, length, EOS), padded(second, length, EOS)]))


def test_a_hundred_thousand_documents_take_no_quadratic_time():
    stream = np.tile(np.array([5, 7, EOS], np.int32), 100_000)
    assert batches(stream, 4, 50).shape == (1500, 4, 50)  # minutes, if each document were cut from the front of a list
    assert batches(padded(stream, 2, EOS), 4, 2).shape == (25_000, 4, 2)

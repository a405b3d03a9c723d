"""Tokens come out unchanged for all sizes; the position is that of the next token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tplr.token_buffer import TokenBuffer


@given(lengths=st.lists(st.integers(0, 6), max_size=8), counts=st.lists(st.integers(0, 9), max_size=12), data=st.data())
@settings(max_examples=200)
def test_tokens_are_taken_in_order(lengths, counts, data):
    numbers = iter(range(1000))
    arrays = [np.array([next(numbers) for _ in range(length)], np.uint16) for length in lengths]
    skip = data.draw(st.integers(0, lengths[0] if lengths else 0))
    buffer, waiting, at = TokenBuffer(skip), [*arrays], skip
    for count in counts:
        while waiting and buffer.length < count:
            buffer.put(waiting.pop(0))
        if buffer.length < count:
            break
        taken = buffer.take(count)
        assert taken.dtype == np.int64
        assert taken.tolist() == [*range(at, at + count)]
        taken[:] = 0  # memory of the caller alone
        at += count
        assert sum(lengths[: buffer.finished]) + buffer.offset == at
        put = sum(lengths[: len(lengths) - len(waiting)])
        assert buffer.peek().tolist() == [*range(at, put)]
        assert buffer.length == put - at


def test_a_position_beyond_the_first_array_ends_with_it():
    buffer = TokenBuffer(skip=5)
    for _ in range(3):
        buffer.put(np.arange(3))
    assert buffer.take(4).tolist() == [0, 1, 2, 0]

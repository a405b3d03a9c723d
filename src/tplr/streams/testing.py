"""Test helper for pipelines: checks that a resume from any sample gives the same samples as no interruption."""

import json
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np

from tplr.streams.dataset import CheckpointableDataset


def same(a: Any, b: Any) -> bool:
    """Whether two samples are equal, types, dtypes and shapes included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "dtype"):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(np.asarray(a), np.asarray(b))
    return a == b


def check_resume(dataset: CheckpointableDataset, *, places: Iterable[int] | None = None, limit: int = 200) -> list[Any]:
    """Assert that the dataset resumes exactly.

    It resumes from a state before each of the first ``limit`` samples and after the last, twice from each, and once
    from a state of the resumed pass. States are converted to JSON and back, and must not be changed by a resume.

    Args:
        places: numbers of samples after which a state is taken; None means all.

    Returns:
        The samples.
    """
    with dataset.iter() as fresh:
        whole = list(islice(fresh, limit))
    with dataset.iter() as again:
        states = [again.state_dict()]
        for _ in range(len(whole)):
            next(again)
            states.append(again.state_dict())
        if len(whole) < limit:  # after the end, too
            assert next(again, None) is None
            assert next(again, None) is None
            states.append(again.state_dict())
    for place in range(len(states)) if places is None else places:
        state = states[place]
        text = json.dumps({**state, "arrays": None})
        arrays = {name: array.clone() for name, array in state["arrays"].items()}
        rest = whole[place:]
        for _ in range(2):
            with dataset.iter(state_dict={**json.loads(text), "arrays": state["arrays"]}) as resumed:
                found = list(islice(resumed, min(1, limit - place)))
                further = resumed.state_dict()
                found += islice(resumed, limit - place - len(found))
            assert same(found, rest), f"resumed after {place}: expected {rest}, got {found}"
            with dataset.iter(state_dict=further) as resumed:
                found = list(islice(resumed, max(0, limit - place - 1)))
            assert same(found, rest[1:]), f"resumed again, after {place + 1}: expected {rest[1:]}, got {found}"
        assert json.dumps({**state, "arrays": None}) == text
        assert same(state["arrays"], arrays)
    return whole

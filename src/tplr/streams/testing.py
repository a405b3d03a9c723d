"""Test helpers for pipelines: a resume from any sample gives the same samples as no interruption, and a resume on
another number of ranks loses and repeats nothing."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from tplr.streams.dataset import CheckpointableDataset, StateDict


def same(a: Any, b: Any) -> bool:
    """Return whether two samples are equal, including types, dtypes and shapes."""
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

    It resumes twice from a state before each of the first ``limit`` samples and after the last, and once from a state
    of the resumed pass. States are converted to JSON and back, and a resume must not change them.

    Args:
        places: numbers of samples after which a state is taken; None means all.

    Returns:
        The samples.
    """
    with dataset.iter() as fresh:
        whole = list(islice(fresh, limit))
    wanted = None if places is None else set(places)
    states: dict[int, StateDict] = {}
    with dataset.iter() as again:
        for place in range(len(whole) + 1):
            if place:
                next(again)
            if wanted is None or place in wanted:
                states[place] = again.state_dict()
        if len(whole) < limit:  # also after the end
            assert next(again, None) is None
            assert next(again, None) is None
            states[len(whole) + 1] = again.state_dict()
    for place in states if wanted is None else sorted(wanted):
        state, rest = states[place], whole[place:]
        before = _through_json(state)
        for _ in range(2):
            with dataset.iter(state_dict=_through_json(state)) as resumed:
                found = list(islice(resumed, min(1, limit - place)))
                further = resumed.state_dict()
                found += islice(resumed, limit - place - len(found))
            assert same(found, rest), f"resumed after {place}: expected {rest}, got {found}"
            with dataset.iter(state_dict=further) as resumed:
                found = list(islice(resumed, max(0, limit - place - 1)))
            assert same(found, rest[1:]), f"resumed again, after {place + 1}: expected {rest[1:]}, got {found}"
        assert same(state, before)
    return whole


def check_worlds(
    make: Callable[[int, int], CheckpointableDataset], worlds: Sequence[int], taken: Callable[[], int]
) -> tuple[list[Any], dict[str, int]]:
    """Run a dataset on ``worlds[0]`` ranks, continue on ``worlds[1]`` from the states of all, and so on, to its end.

    Asserts that no resume changes a state, and that each rank continues exactly from its own state.

    Args:
        make: returns the dataset of a rank of a world, such as
            ``lambda rank, world: dataset.shard_by_rank(rank, world)``.
        taken: called for each rank of each world but the last; returns the number of samples to take before the change.

    Returns:
        The samples of all ranks and worlds, to compare with the expected ones, and the sum of their counts.
    """
    found: list[Any] = []
    counts: Counter[str] = Counter()
    states: list[Mapping[str, Any]] | None = None
    for number, world in enumerate(worlds):
        is_last = number + 1 == len(worlds)
        after: list[Mapping[str, Any]] = []
        before = None if states is None else [_through_json(state) for state in states]
        for rank in range(world):
            with make(rank, world).iter(state_dict=states) as samples:
                found += samples if is_last else islice(samples, taken())
                after.append(samples.state_dict())
                rest = [] if is_last else list(islice(samples, 5))
                counts.update(samples.report() if is_last else {})
            with make(rank, world).iter(state_dict=_through_json(after[-1])) as resumed:
                again = list(islice(resumed, 5))
            assert same(again, rest), f"rank {rank} of {world} resumed: expected {rest}, got {again}"
        assert same(states, before)
        states = after
    return found, dict(counts)


def _through_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that was converted to JSON and back, except for the arrays."""
    arrays = {name: array.clone() for name, array in state["arrays"].items()}
    return {**json.loads(json.dumps({**state, "arrays": None})), "arrays": arrays}

"""Converts saved states to one rank's position: its own state, or its part of the states of all former ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from tplr.errors import StateError
from tplr.sharding import Share
from tplr.streams.iterator import Part, PipelineContext, State, Transform
from tplr.streams.state import FORMAT, unseal

States = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def position_of(states: States, transform: Transform, share: Share) -> State:
    """Return the position at which ``share`` continues.

    Args:
        states: the state of this share, or those of all shares, of this or any other number.

    Raises:
        StateError: a state is damaged, belongs to another pipeline, or is missing.
    """
    given = [states] if isinstance(states, Mapping) or not isinstance(states, Sequence) else [*states]
    lines = transform.pipeline()
    saved = [unseal(state, lines) for state in given]
    positions = {one.share: one.position for one in saved}
    if share in positions and len(positions) == len(saved):
        return positions[share]
    count = saved[0].share.count if saved else 1
    missing = [index for index in range(count) if Share(index, count) not in positions]
    if missing or len(saved) != count:
        got = ", ".join(str(one.share) for one in saved) or "none"
        raise StateError(
            f"this is share {share} (ranks × workers), the state is of share {got}: give the "
            f"state of this share, or a list with the states of all former shares, each once"
        )
    parts = [Part(old, _without_read_ahead(transform, old, position)) for old, position in sorted(positions.items())]
    return transform.divide(parts, share)


def find_states(value: Any) -> list[Mapping[str, Any]]:
    """Return all pipeline states in nested dictionaries and lists, such as the state of a StatefulDataLoader with its
    workers' states."""
    if isinstance(value, Mapping):
        if value.get("format") == FORMAT:
            return [value]
        return [state for item in value.values() for state in find_states(item)]
    return [state for item in value for state in find_states(item)] if isinstance(value, list | tuple) else []


def _without_read_ahead(transform: Transform, share: Share, position: State) -> State:
    context = PipelineContext(share)
    try:
        return transform.without_read_ahead(context, position)
    finally:
        context.close()

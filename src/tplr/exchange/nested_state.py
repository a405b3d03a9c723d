"""Converts nested states of optimizers and schedulers to and from named tensors and JSON, without pickle."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from tplr.errors import StateError


def split_state(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the JSON form of ``value`` and add its tensors to ``tensors``, named by ``name`` and their keys.

    If two tensors have the same name, as with keys 1 and "1", ``~`` is appended to the later one's.

    JSON has only lists and text keys, and no infinity, so tuples, dictionaries and non-finite floats become objects
    with one key.

    Raises:
        StateError: it contains an object of another type.
    """
    match value:
        case None | bool() | int() | str():
            form = value
        case float():
            form = float(value) if math.isfinite(value) else {"float": str(float(value))}
        case torch.Tensor():
            while name in tensors:
                name += "~"
            tensors[name] = value
            form = {"tensor": name}
        case list() | tuple():
            items = [split_state(one, f"{name}.{i}", tensors) for i, one in enumerate(value)]
            form = items if isinstance(value, list) else {"tuple": items}
        case dict():
            pairs = [[key, split_state(one, f"{name}.{key}", tensors)] for key, one in value.items()]
            if not all(isinstance(key, str | int) for key, _ in pairs):
                raise StateError(f"{name} has keys {list(value)[:3]}: expected text and integers")
            form = {"counter" if isinstance(value, Counter) else "dict": pairs}
        case _:
            raise StateError(
                f"{name} is a {type(value).__name__}: expected tensors, numbers, text, None, and lists, tuples and "
                "dictionaries of them"
            )
    return form


def join_state(form: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value for which ``split_state`` returned ``form``. Raises StateError for an invalid form."""
    try:
        return _join(form, tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise StateError(f"malformed state: {error!r}"[:200]) from error


def _join(form: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    match form:
        case None | bool() | int() | float() | str():
            value = form
        case list():
            value = [_join(one, tensors) for one in form]
        case {"tensor": str(name)}:
            value = tensors[name]
        case {"float": str(text)}:
            value = float(text)
        case {"tuple": list(items)}:
            value = tuple(_join(one, tensors) for one in items)
        case {"dict": list(pairs)} | {"counter": list(pairs)}:
            joined = {key: _join(one, tensors) for key, one in pairs}
            value = Counter(joined) if "counter" in form else joined
        case _:
            raise ValueError(str(form)[:80])
    return value

"""Format of a saved position: JSON, a few named arrays, and a description of the pipeline that it belongs to.

::

    {"format": "tplr.data", "version": 1,
     "pipeline": ["from_sequence[10]", "shuffle(4, 42)"],   # one line per transform
     "fingerprint": sha256 of these lines,
     "position": {...},                                     # JSON; an array in it is {"$array": [name, start, shape]}
     "arrays": {"int64": ...}}                              # one flat array for each dtype

A position may hold samples: JSON values, numpy arrays and scalars, tensors, bytes, tuples, and dictionaries with any
such keys.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tplr.errors import StateError
from tplr.files import atomic_writer

FORMAT, VERSION = "tplr.data", 1
_KEYS = {"format", "version", "pipeline", "fingerprint", "position", "arrays"}
_LONG_LIST = 16  # a list of at least so many integers is stored as an array
_INT64 = range(-(2**63), 2**63)


def seal(position: Any, pipeline: Sequence[str]) -> dict[str, Any]:
    """A state that shares nothing with the running pipeline.

    Raises:
        StateError: a sample holds a type that a state can't store.
    """
    arrays: dict[str, list[npt.NDArray[Any]]] = {}
    position = _Writer(arrays).write(position, "position")
    return {
        "format": FORMAT,
        "version": VERSION,
        "pipeline": list(pipeline),
        "fingerprint": fingerprint(pipeline),
        "position": position,
        "arrays": {name: np.concatenate(parts) for name, parts in arrays.items()},
    }


def unseal(state: Mapping[str, Any], pipeline: Sequence[str]) -> Any:
    """The position of ``state``, which is not changed.

    Raises:
        StateError: it was not made by ``seal``, or it is of another pipeline; the message names the first difference.
    """
    if not isinstance(state, Mapping) or set(state) != _KEYS or state["format"] != FORMAT:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"not a state of a pipeline: expected {sorted(_KEYS)}, got {got}")
    if state["version"] != VERSION:
        raise StateError(f"a state of version {state['version']!r}; this release reads version {VERSION}")
    _check_pipeline(list(state["pipeline"]), list(pipeline))
    if state["fingerprint"] != fingerprint(pipeline):
        raise StateError("the state is damaged: its fingerprint is not that of its own pipeline")
    arrays = {name: np.asarray(array) for name, array in state["arrays"].items()}
    try:
        return _read(state["position"], arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the state is damaged: {error!r}") from error


def fingerprint(pipeline: Sequence[str]) -> str:
    """SHA-256, as hex, of the lines, each as ``len:line``."""
    return hashlib.sha256("".join(f"{len(line)}:{line}" for line in pipeline).encode()).hexdigest()


def save_state(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write a state to one file, atomically: numpy's ``npz``, with everything but the arrays as JSON in ``state``."""
    head = json.dumps({name: value for name, value in state.items() if name != "arrays"}).encode()
    arrays = {f"array_{name}": np.asarray(array) for name, array in state["arrays"].items()}
    with atomic_writer(Path(path)) as file:
        np.savez(file, allow_pickle=False, state=np.frombuffer(head, np.uint8), **arrays)


def load_state(path: str | Path) -> dict[str, Any]:
    """Read a state that ``save_state`` wrote. Raises StateError if the file holds none; FileNotFoundError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            state = json.loads(file["state"].tobytes())
            arrays = {name.removeprefix("array_"): file[name] for name in file.files if name != "state"}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise StateError(f"{path} holds no state of a pipeline: {error}") from error
    return {**state, "arrays": arrays}


def _check_pipeline(theirs: list[str], ours: list[str]) -> None:
    for number, (saved, here) in enumerate(zip(theirs, ours, strict=False), 1):
        if saved != here:
            raise StateError(f"the state is of another pipeline: transform {number} was {saved}, here it is {here}")
    if len(theirs) != len(ours):
        more = theirs[len(ours) :] or ours[len(theirs) :]
        where = "has" if len(theirs) > len(ours) else "lacks"
        raise StateError(f"the state is of another pipeline: it {where} the further transforms {', '.join(more)}")


class _Writer:
    def __init__(self, arrays: dict[str, list[npt.NDArray[Any]]]) -> None:
        self._arrays = arrays
        self._lengths: dict[str, int] = {}

    def write(self, value: Any, where: str) -> Any:  # noqa: PLR0911 - one for each type
        if value is None or isinstance(value, bool | str) or type(value) in (int, float):
            return value
        if isinstance(value, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.write(item, f"{where}.{key}") for key, item in value.items()}
            return {"$dict": [[self.write(key, where), self.write(item, where)] for key, item in value.items()]}
        if type(value) is list:
            if len(value) >= _LONG_LIST and all(type(item) is int and item in _INT64 for item in value):
                return {"$ints": self._array(np.array(value, np.int64))}
            return [self.write(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if type(value) is tuple:
            return {"$tuple": [self.write(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, bytes):
            return {"$bytes": self._array(np.frombuffer(value, np.uint8))}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"$scalar": self._array(np.asarray(value))}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return {"$array": self._array(value)}
        if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
            return {"$tensor": [str(value.dtype).removeprefix("torch."), self._array(_tensor_bits(value))]}
        raise StateError(
            f"{where} holds {type(value).__name__}, which a state can't store: use numbers, strings, bytes, lists, "
            f"tuples, dictionaries, numpy arrays or tensors before transforms that keep samples"
        )

    def _array(self, array: npt.NDArray[Any]) -> list[Any]:
        name = array.dtype.newbyteorder("=").name
        start = self._lengths.get(name, 0)
        self._lengths[name] = start + array.size
        self._arrays.setdefault(name, []).append(np.array(array, dtype=array.dtype.newbyteorder("=")).reshape(-1))
        return [name, start, list(array.shape)]


def _tensor_bits(tensor: Any) -> npt.NDArray[Any]:
    import torch

    tensor = tensor.detach().cpu()
    # numpy has no bfloat16 and no 8-bit floats: their bits are stored as integers.
    integers = {torch.bfloat16: torch.int16} | dict.fromkeys(
        [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and str(dtype)[6:12] == "float8"],
        torch.int8,
    )
    return (tensor.contiguous().view(integers[tensor.dtype]) if tensor.dtype in integers else tensor).numpy()


def _read(value: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:  # noqa: PLR0911 - one for each mark
    if isinstance(value, list):
        return [_read(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (tag := next(iter(value))).startswith("$"):
        return {key: _read(item, arrays) for key, item in value.items()}
    body = value[tag]
    match tag:
        case "$dict":
            return {_read(key, arrays): _read(item, arrays) for key, item in body}
        case "$tuple":
            return tuple(_read(item, arrays) for item in body)
        case "$array":
            return _slice(body, arrays)
        case "$ints":
            return _slice(body, arrays).tolist()
        case "$bytes":
            return _slice(body, arrays).tobytes()
        case "$scalar":
            return _slice(body, arrays)[()]
        case "$tensor":
            import torch

            dtype, place = body
            tensor = torch.from_numpy(_slice(place, arrays))
            return tensor.view(getattr(torch, dtype)) if str(tensor.dtype) != f"torch.{dtype}" else tensor
    raise ValueError(f"unknown mark {tag}")


def _slice(place: Sequence[Any], arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    name, start, shape = place
    size = math.prod(shape)
    flat = arrays[name][start : start + size]
    if flat.dtype.name != name or len(flat) != size:
        raise ValueError(f"array {name} does not hold {size} values from {start} on")
    return flat.copy().reshape(shape)

"""Format of a saved position: JSON, a few named arrays, and a description of the pipeline that it belongs to.

::

    {"format": "tplr.data", "version": 2,
     "pipeline": ["from_sequence[10]", "shuffle(4, 42)"],   # one line per transform
     "fingerprint": sha256 of these lines,
     "share": [1, 4],                                       # of rank (or worker) 1 of 4
     "position": {...},                                     # JSON; an array in it is {"$array": [name, start, shape]}
     "arrays": {"uint16": ...}}                             # one flat array for each dtype

A position may hold samples: JSON values, numpy arrays and scalars, tensors, bytes, tuples, and dictionaries with any
such keys. A list of samples with equal columns is stored by column, and rows of integers in the smallest dtype that
holds them: a token of a vocabulary below 65,536 takes two bytes.
"""

import hashlib
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tplr.errors import StateError
from tplr.files import atomic_writer
from tplr.sharding import Share

FORMAT, VERSION = "tplr.data", 2
_KEYS = {"format", "version", "pipeline", "fingerprint", "share", "position", "arrays"}
_LONG_LIST = 16  # a list of at least this many integers is stored as an array
WHOLE = Share(0, 1)
_INT64 = range(-(2**63), 2**63)
_MAX_INTEGER = 2**63 - 1
_KINDS = "biufc"  # of dtypes that a state can store
PLAIN = frozenset({type(None), bool, int, float, str, bytes})  # values of these types can always be stored


class Saved(NamedTuple):
    """The content of a state: the position of one share of a pipeline's data."""

    share: Share
    position: dict[str, Any]


def seal(position: Any, pipeline: Sequence[str], share: Share = WHOLE) -> dict[str, Any]:
    """Return a state that shares only strings with the running pipeline.

    Raises:
        StateError: a sample holds a type that a state can't store.
    """
    writer = _Writer()
    return {
        "format": FORMAT,
        "version": VERSION,
        "pipeline": list(pipeline),
        "fingerprint": fingerprint(pipeline),
        "share": [share.index, share.count],
        "position": writer.write(position, "position"),
        "arrays": writer.arrays(),
    }


def unseal(state: Mapping[str, Any], pipeline: Sequence[str]) -> Saved:
    """Return the share and the position of ``state``, which is not changed.

    Raises:
        StateError: ``seal`` did not create it, or it belongs to another pipeline (the message names the first
            difference).
    """
    if not isinstance(state, Mapping) or "format" not in state or state["format"] != FORMAT:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"not a state of a pipeline: expected {sorted(_KEYS)}, got {got}")
    if state.get("version") != VERSION:
        raise StateError(f"a state of version {state.get('version')!r}; this release reads version {VERSION}")
    if set(state) != _KEYS:
        raise StateError(f"not a state of version {VERSION}: expected {sorted(_KEYS)}, got {sorted(map(str, state))}")
    theirs = state["pipeline"]
    if not isinstance(theirs, list | tuple) or not all(isinstance(line, str) for line in theirs):
        raise StateError(f"the state is damaged: pipeline: expected a list of lines, got {_short(theirs)}")
    _check_pipeline([*theirs], [*pipeline])
    if state["fingerprint"] != fingerprint(pipeline):
        raise StateError("the state is damaged: its fingerprint is not that of its own pipeline")
    envelope = StateReader("this pipeline", {"share": state["share"], "position": state["position"]})
    index, count = (envelope.integer_of(value, "share") for value in envelope.items("share", length=2))
    if index >= count:
        raise envelope.wrong("share", "an index below its count")
    envelope.child("position")
    try:
        arrays = {name: np.asarray(array) for name, array in state["arrays"].items()}
        return Saved(Share(index, count), _read(state["position"], arrays))
    except Exception as error:  # a damaged value can lead to any error
        raise StateError(f"the state is damaged: {error!r}") from error


def fingerprint(pipeline: Sequence[str]) -> str:
    """Return the hex SHA-256 of the lines, each as ``len:line``."""
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
        if not isinstance(state, dict):
            raise TypeError(f"expected a dictionary, got {type(state).__name__}")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError, NotImplementedError) as error:
        raise StateError(f"{path} holds no state of a pipeline: {error}") from error
    except (zipfile.BadZipFile, zipfile.LargeZipFile, SyntaxError, AttributeError, RuntimeError) as error:
        # errors of zipfile and numpy's header parser for damaged bytes
        raise StateError(f"{path} is torn or damaged: {error}; use the state saved before it") from error
    return {**state, "arrays": arrays}


def check_sample(sample: Any, stage: str, plain: frozenset[type] = PLAIN) -> None:
    """Raise StateError if a state can't store ``sample``, which ``stage`` is to keep.

    Values of the types ``plain`` are not checked. In a list of more than ``_LONG_LIST`` items only the first and the
    last are checked: checking all takes as long as reading them.
    """
    if not _storable(sample, plain):
        _Writer().write(sample, f"{stage}: the sample")


def _storable(value: Any, plain: frozenset[type]) -> bool:
    """Return whether a state can certainly store ``value``."""
    kind = type(value)
    if kind in plain:
        return True
    if kind is dict:
        return all(type(key) is str and _storable(item, plain) for key, item in value.items())
    if kind is list or kind is tuple:
        return all(_storable(item, plain) for item in (value if len(value) <= _LONG_LIST else (value[0], value[-1])))
    return kind is np.ndarray and value.dtype.kind in _KINDS


class StateReader:
    """Checked access to the state of one transform, which is not changed.

    Each method raises StateError, naming the transform and the key, if the transform can't have written the value.
    """

    def __init__(self, stage: str, values: Any) -> None:
        self.stage = stage
        if not isinstance(values, dict):
            raise StateError(f"the state of {stage} is damaged: expected a dictionary, got {_short(values)}")
        self._values: dict[Any, Any] = values

    def any(self, key: str) -> Any:
        if key not in self._values:
            raise StateError(f"the state of {self.stage} is damaged: it lacks {key!r}")
        return self._values[key]

    def has(self, key: str) -> bool:
        return key in self._values

    def integer(self, key: str, *, low: int = 0, high: int | None = None) -> int:
        """Return a number from ``low`` to ``high``."""
        return self.integer_of(self.any(key), key, low=low, high=high)

    def integer_of(self, value: Any, key: str, *, low: int = 0, high: int | None = None) -> int:
        """Return ``value``, which is a part of the value at ``key``, checked like ``integer``."""
        if type(value) is not int or not low <= value <= (_MAX_INTEGER if high is None else high):
            raise self.wrong(key, f"a whole number of {low} {'or more' if high is None else f'to {high}'}", value)
        return value

    def flag(self, key: str) -> bool:
        value = self.any(key)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self.any(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def items(self, key: str, *, length: int | None = None, kind: type = object) -> list[Any]:
        """Return a copy of a list."""
        value = self.any(key)
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise self.wrong(key, f"a list{'' if length is None else f' of {length}'}")
        for item in value:
            if not isinstance(item, kind):
                raise self.wrong(key, f"a list of {kind.__name__}", item)
        return list(value)

    def integers(self, key: str, *, length: int | None = None) -> list[int]:
        return [self.integer_of(value, key) for value in self.items(key, length=length)]

    def counts(self) -> dict[str, int]:
        value = self.any("counts")
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise self.wrong("counts", "numbers by name")
        return {name: self.integer_of(count, f"counts.{name}") for name, count in value.items()}

    def numbered(self, key: str, *, high: int) -> dict[int, dict[str, Any]]:
        """Return states by number, up to ``high``."""
        value = self.any(key)
        if not isinstance(value, dict) or not all(
            isinstance(number, str) and number.isdecimal() and int(number) <= high and isinstance(one, dict)
            for number, one in value.items()
        ):
            raise self.wrong(key, f"states by number, up to {high}")
        return {int(number): one for number, one in value.items()}

    def child(self, key: str = "source") -> dict[str, Any]:
        """Return the state of a source."""
        value = self.any(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "a dictionary")
        return value

    def wrong(self, key: str, expected: str, *got: Any) -> StateError:
        """Return the error for the value at ``key``, or ``got``."""
        value = got[0] if got else self.any(key)
        return StateError(
            f"the state of {self.stage} is damaged: {key}: expected {expected}, got {_short(value)}; use another state"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_pipeline(theirs: list[str], ours: list[str]) -> None:
    for number, (saved, here) in enumerate(zip(theirs, ours, strict=False), 1):
        if saved != here:
            raise StateError(f"the state is of another pipeline: transform {number} was {saved}, here it is {here}")
    if len(theirs) != len(ours):
        more = theirs[len(ours) :] or ours[len(theirs) :]
        where = "has" if len(theirs) > len(ours) else "lacks"
        raise StateError(f"the state is of another pipeline: it {where} the further transforms {', '.join(more)}")


class _Writer:
    """Converts values to JSON, and keeps their arrays, uncopied, until ``arrays`` joins them."""

    def __init__(self) -> None:
        self._parts: dict[str, list[npt.NDArray[Any]]] = {}
        self._lengths: dict[str, int] = {}

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return one array for each dtype."""
        return {
            name: np.concatenate(parts, dtype=np.dtype(name), casting="unsafe") for name, parts in self._parts.items()
        }

    def write(self, value: Any, where: str) -> Any:  # noqa: PLR0911 - one for each type
        if value is None or isinstance(value, bool | str) or type(value) in (int, float):
            return value
        if isinstance(value, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.write(item, f"{where}.{key}") for key, item in value.items()}
            return {"$dict": [[self.write(key, where), self.write(item, where)] for key, item in value.items()]}
        if type(value) is list:
            return self._list(value, where)
        if type(value) is tuple:
            return {"$tuple": [self.write(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, bytes):
            return {"$bytes": self._array(np.frombuffer(value, np.uint8))}
        if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
            return {"$scalar": self._array(np.asarray(value))}
        if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
            return {"$array": self._array(value)}
        if _is_tensor(value):
            return {"$tensor": [str(value.dtype).removeprefix("torch."), self._array(_tensor_bits(value))]}
        raise StateError(
            f"{where} holds {type(value).__name__}, which a state can't store: use numbers, strings, bytes, lists, "
            f"tuples, dictionaries, numpy arrays or tensors before transforms that keep samples"
        )

    def _list(self, value: list[Any], where: str) -> Any:
        kinds = set(map(type, value))
        if len(value) >= _LONG_LIST and _is_integers(value):
            return {"$ints": self._rows([np.array(value, np.int64)])}
        if kinds == {dict} and len(value) > 1:
            columns = tuple(value[0])
            if columns and all(type(name) is str for name in columns) and all(tuple(row) == columns for row in value):
                return {"$samples": {name: self._column([row[name] for row in value], f"{where}[…].{name}")
                                     for name in columns}}  # fmt: skip
        if kinds <= {str, float, bool}:
            return [*value]
        return [self.write(item, f"{where}[{i}]") for i, item in enumerate(value)]

    def _column(self, values: list[Any], where: str) -> Any:
        """Convert one column's values; rows of integers with one type and dtype become one array and their lengths."""
        kind = type(values[0])
        if any(type(value) is not kind for value in values):
            return self.write(values, where)
        if kind is list and all(map(_is_integers, values)):
            return {"$rows": ["list", "int64", *self._ragged([np.array(value, np.int64) for value in values])]}
        if kind is np.ndarray and _are_integer_rows(values):
            return {"$rows": ["array", values[0].dtype.newbyteorder("=").name, *self._ragged(values)]}
        if _is_tensor(values[0]) and _are_integer_rows(values):
            arrays = [_tensor_bits(value) for value in values]
            if arrays[0].dtype.kind in "iu" and str(values[0].dtype) == f"torch.{arrays[0].dtype.name}":
                return {"$rows": ["tensor", arrays[0].dtype.name, *self._ragged(arrays)]}
        return self.write(values, where)

    def _ragged(self, rows: list[npt.NDArray[Any]]) -> list[Any]:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return [self._rows([lengths]), self._rows(rows)]

    def _rows(self, rows: list[npt.NDArray[Any]]) -> list[Any]:
        """Store integers in the smallest dtype that holds them all; return their place."""
        name = smallest(rows)
        start = self._lengths.get(name, 0)
        size = sum(map(len, rows))
        self._lengths[name] = start + size
        self._parts.setdefault(name, []).extend(rows)
        return [name, start, [size]]

    def _array(self, array: npt.NDArray[Any]) -> list[Any]:
        name = array.dtype.newbyteorder("=").name
        start = self._lengths.get(name, 0)
        self._lengths[name] = start + array.size
        self._parts.setdefault(name, []).append(array.reshape(-1))
        return [name, start, list(array.shape)]


def smallest(rows: Sequence[npt.NDArray[Any]]) -> str:
    """Return the name of the smallest dtype that holds all integers of ``rows``: uint16, int32 or their own."""
    own = rows[0].dtype.newbyteorder("=").name
    if rows[0].dtype.itemsize <= 2:
        return own
    bits = 0  # the OR of all numbers is below 2**16 only if each number is, and none is negative
    for row in rows:
        bits |= int(np.bitwise_or.reduce(row)) if len(row) else 0
        if not 0 <= bits < 2**16:
            break
    else:
        return "uint16"
    if rows[0].dtype.itemsize <= 4:
        return own
    full = [row for row in rows if len(row)]
    limits = np.iinfo(np.int32)
    fits = all(limits.min <= int(row.min()) and int(row.max()) <= limits.max for row in full)
    return "int32" if fits else own


def _are_integer_rows(values: Sequence[Any]) -> bool:
    """Return whether arrays or tensors are rows of integers of one dtype."""
    dtype = values[0].dtype
    integers = dtype.kind in "iu" if isinstance(dtype, np.dtype) else not dtype.is_floating_point
    return integers and all(value.ndim == 1 and value.dtype == dtype for value in values)


def _is_integers(value: list[Any]) -> bool:
    """Return whether a list is not empty and holds only 64-bit integers."""
    return set(map(type, value)) == {int} and min(value) in _INT64 and max(value) in _INT64


def _is_tensor(value: Any) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ == "Tensor"


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
        case "$samples":
            columns = [_read(column, arrays) for column in body.values()]
            return [dict(zip(body, row, strict=True)) for row in zip(*columns, strict=True)]
        case "$rows":
            return _read_rows(body, arrays)
        case "$tensor":
            import torch

            dtype, place = body
            tensor = torch.from_numpy(_slice(place, arrays))
            return tensor.view(getattr(torch, dtype)) if str(tensor.dtype) != f"torch.{dtype}" else tensor
    raise ValueError(f"unknown mark {tag}")


def _read_rows(body: Sequence[Any], arrays: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
    kind, dtype, lengths, place = body
    ends = np.cumsum(_slice(lengths, arrays).astype(np.int64))
    flat = _slice(place, arrays).astype(np.dtype(dtype), copy=False)
    if (ends[-1] if len(ends) else 0) != len(flat):
        raise ValueError("the row lengths do not match the data")
    if kind == "tensor":
        import torch

        return [*torch.from_numpy(flat).split(np.diff(ends, prepend=0).tolist())]
    rows = np.split(flat, ends[:-1])
    return [row.tolist() for row in rows] if kind == "list" else rows


def _slice(place: Sequence[Any], arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    name, start, shape = place
    size = math.prod(shape)
    flat = arrays[name][start : start + size]
    if start < 0 or flat.dtype.name != name or flat.dtype.kind not in _KINDS or len(flat) != size:
        raise ValueError(f"array {name} does not hold {size} values from {start} on")
    return flat.copy().reshape(shape)

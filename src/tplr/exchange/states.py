"""Converts a state dict to and from one safetensors object; non-tensors are JSON in the header. Pickle is not used."""

import json
import threading
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from tplr.errors import PayloadError
from tplr.untrusted import load_json, printable

MAX_HEADER_BYTES = 1 << 20
MAX_DIMENSIONS = 8  # torch can't read all tensors of more than 64
MAX_STEP = 2**53 - 1  # largest integer that every JSON parser reads exactly
# A gather keeps a list over all peers for each name that any peer sends.
MAX_VALUES = 1024
# Lists and objects, which the garbage collector visits again and again: a header has room for 350,000.
MAX_CONTAINERS = 10_000
# A header has room for this many tensors, each with an object and two lists.
_MOST_TENSORS = MAX_HEADER_BYTES // 50
# Added to a norm before the division, as in documented networks, so that values of 0 stay 0.
NORM_EPSILON = 1e-8
_STORABLE = (
    f"JSON with finite numbers, no key twice and at most {MAX_CONTAINERS} lists and objects (each [ and {{ counts, "
    "also in strings: store numbers in tensors), or a dense tensor with another name than __metadata__, at most "
    f"{MAX_DIMENSIONS} dimensions, and a type that safetensors.torch.load knows"
)
# Errors of the safetensors library and of torch for a well-formed header with invalid content.
_UNREADABLE = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError)
# The parsers hold the interpreter's lock, for tenths of a second for a hostile header. The event loop would wait for
# all threads that parse at the same time, so that there is only one.
_parsing = threading.Lock()


class State(NamedTuple):
    """The state of a window. Values are tensors, and up to ``MAX_VALUES`` JSON values."""

    state_dict: dict[str, Any]
    global_step: int


def encode_state(state_dict: Mapping[str, Any], global_step: int) -> bytes:
    """Return the bytes of a state.

    Raises:
        ValueError: ``decode_state`` would refuse it: a name is not a string or is reserved, a value is neither a tensor
            that safetensors can hold nor JSON, there are too many or too large JSON values, or too many lists and
            objects in them, a tensor has more than 8 dimensions, or the step is out of range.
    """
    tensors, metadata = _split(state_dict, global_step)
    body = save(tensors, metadata)
    _check_header(body[: 8 + MAX_HEADER_BYTES])
    return body


def write_state(path: Path, state_dict: Mapping[str, Any], global_step: int) -> None:
    """Write the bytes of ``encode_state`` to a file. Raises ValueError as ``encode_state``, and OSError."""
    tensors, metadata = _split(state_dict, global_step)
    save_file(tensors, path, metadata)
    with path.open("rb") as file:
        _check_header(file.read(8 + MAX_HEADER_BYTES))


def state_bytes(state_dict: Mapping[str, Any]) -> int:
    """Return the size of a state's tensors in bytes."""
    tensors = (value for value in state_dict.values() if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _split(state_dict: Mapping[str, Any], global_step: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a state, each with its own memory, and the metadata of its file."""
    if not _is_step(global_step) or not all(isinstance(name, str) for name in state_dict):
        names = [*state_dict][:3]
        raise ValueError(f"global_step {global_step}, names {names}…: expected 0 to {MAX_STEP}, and strings")
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    values = {name: value for name, value in state_dict.items() if name not in tensors}
    if len(values) > MAX_VALUES:
        raise ValueError(
            f"state dict: {len(values)} plain values, at most {MAX_VALUES} are allowed: combine some in one value"
        )
    for name, value in state_dict.items():
        _check_entry(name, value)
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    return copies, _metadata(values, global_step)


def _check_entry(name: str, value: Any) -> None:
    """Raise ValueError unless ``decode_state`` accepts a state of this entry; a tensor is tried without its data."""
    try:
        if isinstance(value, torch.Tensor):
            body = save({name: value.detach().new_empty([0] * max(1, value.dim()))}, _metadata({}, 0))
        else:
            body = save({}, _metadata({name: value}, 0))
        _parsed(body)
    except (PayloadError, *_UNREADABLE) as error:
        raise ValueError(
            f"state dict: {name[:80]!r} ({_described(value)}) can't be stored: {str(error)[:200]}; expected {_STORABLE}"
        ) from error


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}, {value.layout}, {value.dim()} dimensions, on {value.device}"
    return type(value).__name__


def _metadata(values: Mapping[str, Any], global_step: int) -> dict[str, str]:
    return {"state": json.dumps({"global_step": global_step, "values": values}, allow_nan=False)}


def _is_step(step: object) -> bool:
    return type(step) is int and 0 <= step <= MAX_STEP


def _check_header(head: bytes) -> None:
    """Raise ValueError if ``decode_state`` would not parse the header of the state that begins with ``head``."""
    if (size := _header_bytes(head)) > MAX_HEADER_BYTES:
        raise ValueError(f"state dict: names and plain values take {size} bytes, at most 1 MiB is allowed")
    text = head[8 : 8 + size]
    for part, most in ((text, _most_containers(None)), (json.loads(text)["__metadata__"]["state"], MAX_CONTAINERS)):
        if (found := _containers(part)) > most:
            raise ValueError(
                f"state dict: names and plain values hold {found} lists and objects (each [ and {{ counts, also in "
                f"strings), at most {most} are allowed: store numbers in tensors"
            )


def _containers(text: str | bytes) -> int:
    """Return the number of ``[`` and ``{`` of a JSON text, which has no more lists and objects."""
    return text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")


def _most_containers(names: Set[str] | None) -> int:
    """Return how many ``_containers`` a header with tensors of these ``names`` may have; None: of any names."""
    tensors = _MOST_TENSORS if names is None else len(names)
    return 2 + 3 * tensors + sum(map(_containers, names or ())) + MAX_CONTAINERS


def decode_state(body: bytes, names: Set[str] | None = None) -> State:
    """Parse a state from untrusted bytes; it takes no more memory than the bytes.

    Args:
        names: of all its tensors. Others are refused before any tensor is created, which takes longest. None: any.

    Raises:
        PayloadError: the bytes are not a state.
    """
    with _parsing:
        return _parsed(body, names)


def _parsed(body: bytes, names: Set[str] | None = None) -> State:
    """Do the work of ``decode_state``, without waiting for other threads: a node's own state need not."""
    if not 0 < (size := _header_bytes(body)) <= min(MAX_HEADER_BYTES, len(body) - 8):
        raise PayloadError(f"header: {size} of {len(body)} bytes, at most 1 MiB is allowed")
    try:
        _refuse_containers(body[8 : 8 + size], _most_containers(names))
        header = load_json(body[8 : 8 + size])
        values_text = header["__metadata__"]["state"]
        found = header.keys() - {"__metadata__"}
        if names is not None and found != names:
            raise PayloadError(f"{len(found ^ names)} tensors are missing or unknown")
        _refuse_containers(values_text, MAX_CONTAINERS)
        state = load_json(values_text)
        tensors = load(body)
        step, values = state["global_step"], state["values"]
        if large := [name for name, tensor in tensors.items() if tensor.dim() > MAX_DIMENSIONS]:
            raise ValueError(f"{large[0][:80]}: more than {MAX_DIMENSIONS} dimensions")
    except RecursionError as error:
        raise PayloadError("header: nested too deep") from error
    except _UNREADABLE as error:
        raise PayloadError(f"no state: {printable(str(error)[:200])}") from error
    if not _is_step(step) or not isinstance(values, dict) or values.keys() & tensors.keys():
        raise PayloadError("header: expected a global_step, and values under other names than the tensors'")
    if len(values) > MAX_VALUES:
        raise PayloadError(f"header: {len(values)} plain values, at most {MAX_VALUES} are allowed")
    return State({**values, **tensors}, step)


def _refuse_containers(text: object, most: int) -> None:
    if isinstance(text, str | bytes) and (found := _containers(text)) > most:
        raise PayloadError(f"header: {found} lists and objects, at most {most} are allowed")


def _header_bytes(body: bytes) -> int:
    return int.from_bytes(body[:8], "little")


def parse_state(body: bytes, names: Set[str] | None = None) -> State:
    """Parse a state with finite tensors as ``decode_state``. Raises PayloadError for anything else."""
    state = decode_state(body, names)
    for name, tensor in _tensors(state).items():
        # torch lacks isfinite for some 8-bit floats.
        numbers = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        if not numbers.isfinite().all():
            raise PayloadError(f"{printable(name[:80])}: not finite")
    return state


def parse_sparse(body: bytes, totalks: Mapping[str, int] | None, *, topk: int, device: torch.device | str) -> State:
    """Parse a state from untrusted bytes; with ``totalks``, its tensors must be exactly those sparse coefficients.

    Values that have indices (``{parameter}vals`` beside ``{parameter}idxs``) are scaled to unit L2 norm, so that every
    peer has the same weight.

    Args:
        totalks: for each parameter, the number of entries that an index points into. ``{parameter}idxs`` has shape
            ``[..., min(topk, totalk)]`` and holds integers in ``[0, totalk)``, none twice in a row; ``{parameter}vals``
            has the same shape and holds finite floats. None: any finite tensors.

    Raises:
        PayloadError: anything else.
    """
    names = None if totalks is None else {f"{name}{part}" for name in totalks for part in ("idxs", "vals")}
    state = parse_state(body, names)
    tensors = _tensors(state)
    if totalks is not None:
        for parameter, totalk in totalks.items():
            _check_pair(parameter, tensors[f"{parameter}idxs"], tensors[f"{parameter}vals"], totalk, topk)
    tensors |= {name: _unit_norm(values) for name, values in _values(tensors).items()}
    try:
        return State(state.state_dict | {name: one.to(device) for name, one in tensors.items()}, state.global_step)
    except (RuntimeError, TypeError) as error:
        raise PayloadError(f"its tensors can't be moved to {device}: {error}") from error


def _tensors(state: State) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.state_dict.items() if isinstance(value, torch.Tensor)}


def _values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values that have indices, by name."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.endswith("vals") and f"{name.removesuffix('vals')}idxs" in tensors and tensor.is_floating_point()
    }


def _unit_norm(values: torch.Tensor) -> torch.Tensor:
    wide = values.double()  # the squares of all float32 values are finite in float64
    return (wide / (torch.linalg.vector_norm(wide) + NORM_EPSILON)).to(values.dtype)


def _check_pair(parameter: str, idxs: torch.Tensor, vals: torch.Tensor, totalk: int, topk: int) -> None:
    integers = (torch.int64, torch.int32, torch.int16, torch.uint8)
    if idxs.dtype not in integers or not vals.is_floating_point():
        raise PayloadError(f"{parameter}: indices are {idxs.dtype} and values {vals.dtype}")
    if idxs.shape != vals.shape or not idxs.dim() or not idxs.numel():
        raise PayloadError(f"{parameter}: indices {list(idxs.shape)[:8]} and values {list(vals.shape)[:8]} of {totalk}")
    if idxs.shape[-1] != min(topk, totalk):
        raise PayloadError(f"{parameter}: {idxs.shape[-1]} indices in a row of {totalk}, expected {min(topk, totalk)}")
    order = idxs.long().sort(dim=-1).values
    if order[..., 0].min() < 0 or order[..., -1].max() >= totalk or (order.diff(dim=-1) == 0).any():
        raise PayloadError(f"{parameter}: an index is out of [0, {totalk}), or twice in a row")

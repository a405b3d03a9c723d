"""A state dict ↔ one safetensors object: tensors as they are, all else as JSON in its header. Nothing is unpickled."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from tplr.errors import PayloadError

MAX_HEADER_BYTES = 1 << 20
# What the safetensors library and torch raise for headers that are well-formed and senseless.
_UNREADABLE = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError)


class State(NamedTuple):
    """What a node publishes for a window. Values are tensors, or plain JSON values."""

    state_dict: dict[str, Any]
    global_step: int


def encode_state(state_dict: Mapping[str, Any], global_step: int) -> bytes:
    """The bytes of a state.

    Raises:
        ValueError: a name is no text, a value neither a tensor nor JSON, or the step negative.
    """
    if global_step < 0 or not all(isinstance(name, str) for name in state_dict):
        raise ValueError(f"global_step {global_step}, names {list(state_dict)[:3]}…: expected 0 or more, and texts")
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    values = {name: value for name, value in state_dict.items() if name not in tensors}
    try:
        text = json.dumps({"global_step": global_step, "values": values}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"state dict: a value is neither a tensor nor JSON: {error}") from error
    body = save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, {"state": text})
    if _header_bytes(body) > MAX_HEADER_BYTES:
        raise ValueError(f"state dict: names and plain values take {_header_bytes(body)} bytes, at most 1 MiB may be")
    return body


def decode_state(body: bytes, device: torch.device | str = "cpu") -> State:
    """The state that a stranger's bytes hold, tensors on ``device``; at most as large as they are.

    Raises:
        PayloadError: they are anything else.
    """
    if not 0 < _header_bytes(body) <= min(MAX_HEADER_BYTES, len(body) - 8):
        raise PayloadError("header: its length is out of bounds")
    try:
        header = json.loads(body[8 : 8 + _header_bytes(body)], object_pairs_hook=_no_duplicates)
        state = json.loads(header["__metadata__"]["state"], object_pairs_hook=_no_duplicates)
        step, values = state["global_step"], state["values"]
        tensors = {name: tensor.to(device) for name, tensor in load(body).items()}
    except RecursionError as error:
        raise PayloadError("header: nested too deep") from error
    except _UNREADABLE as error:
        raise PayloadError(f"no state: {str(error)[:200]}") from error
    if type(step) is not int or not 0 <= step < 2**53 or not isinstance(values, dict) or values.keys() & tensors.keys():
        raise PayloadError("header: expected a global_step, and values under other names than the tensors'")
    return State({**values, **tensors}, step)


def _header_bytes(body: bytes) -> int:
    return int.from_bytes(body[:8], "little")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def parse_sparse(body: bytes, totalks: Mapping[str, int] | None, device: torch.device | str) -> State:
    """A state from a stranger whose tensors are, with ``totalks``, exactly the sparse coefficients that it names.

    Args:
        totalks: parameter to the number of entries that an index points into. Of each, ``{parameter}idxs`` holds
            integers of ``[0, totalk)`` and ``{parameter}vals`` as many finite floats, in rows: ``[..., k]``, k up to
            totalk, no index twice in a row.

    Raises:
        PayloadError: it is anything else. Without ``totalks``: a number is not finite.
    """
    state = decode_state(body, device)
    tensors = {name: value for name, value in state.state_dict.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        # torch can't say it of every 8-bit float.
        numbers = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        if not numbers.isfinite().all():
            raise PayloadError(f"{name[:80]}: not finite")
    if totalks is not None:
        wanted = {f"{parameter}{part}" for parameter in totalks for part in ("idxs", "vals")}
        if tensors.keys() != wanted:
            raise PayloadError(f"{len(tensors.keys() ^ wanted)} tensors are missing or unknown")
        for parameter, totalk in totalks.items():
            _check_pair(parameter, tensors[f"{parameter}idxs"], tensors[f"{parameter}vals"], totalk)
    return state


def _check_pair(parameter: str, idxs: torch.Tensor, vals: torch.Tensor, totalk: int) -> None:
    integers = (torch.int64, torch.int32, torch.int16, torch.uint8)
    if idxs.dtype not in integers or not vals.is_floating_point():
        raise PayloadError(f"{parameter}: indices are {idxs.dtype} and values {vals.dtype}")
    if idxs.shape != vals.shape or not idxs.dim() or not 0 < idxs.shape[-1] <= totalk or not idxs.numel():
        raise PayloadError(f"{parameter}: indices {list(idxs.shape)[:8]} and values {list(vals.shape)[:8]} of {totalk}")
    order = idxs.long().sort(dim=-1).values
    if order[..., 0].min() < 0 or order[..., -1].max() >= totalk or (order.diff(dim=-1) == 0).any():
        raise PayloadError(f"{parameter}: an index is out of [0, {totalk}), or stands twice in a row")

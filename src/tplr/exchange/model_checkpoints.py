"""Converts a program's model, optimizer, scheduler and momentum to and from a snapshot, in the format of nodes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from tplr.errors import StateError
from tplr.exchange.nested_state import join_state, split_state
from tplr.exchange.snapshot import ShardWriter, SnapshotManifest, SnapshotReader, TensorLayout, write_manifest

# Maximum size of optimizer state and momentum together, in copies of the model. Adam with a momentum has three.
MAX_COPIES = 4
SPARE_BYTES = 2**20


class StateHolder(Protocol):
    """An optimizer or a scheduler of PyTorch."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


class LoadedCheckpoint(NamedTuple):
    """The contents of a checkpoint other than the states that it restored.

    Attributes:
        uid: of the node that published it.
        window: the next window to work on.
        momentum: by parameter, on the parameters' devices; empty if the checkpoint holds none.
    """

    uid: int
    window: int
    start_window: int
    global_step: int
    momentum: dict[str, torch.Tensor]


def write_checkpoint(
    folder: Path,
    model: nn.Module,
    holders: Mapping[str, StateHolder | None],
    momentum: Mapping[str, torch.Tensor],
    *,
    window: int,
    start_window: int,
    global_step: int,
    version: str,
) -> SnapshotManifest:
    """Write a snapshot; no tensor may change during the call. Blocks.

    Args:
        holders: optimizer and scheduler by their names; None is skipped.

    Raises:
        StateError: a state contains anything but tensors and plain values, or the disk is full.
    """
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(model).items()}
    tensors |= {f"momentum.{name}": tensor for name, tensor in momentum.items()}
    values = {name: split_state(one.state_dict(), name, tensors) for name, one in holders.items() if one is not None}
    writer = ShardWriter(folder)
    for group in ("model", "momentum", *holders):  # readers that want only some groups fetch only their shards
        writer.write({name: one for name, one in tensors.items() if name.startswith(f"{group}.")})
    manifest = SnapshotManifest(
        window=window,
        start_window=start_window,
        global_step=global_step,
        version=version,
        values=values,
        tensors=writer.tensors,
        shards=tuple(writer.shards),
    )
    write_manifest(folder, manifest)
    return manifest


def wanted_tensors(
    manifest: SnapshotManifest, model: nn.Module, holders: Mapping[str, StateHolder | None]
) -> dict[str, TensorLayout]:
    """Return the tensors of a checkpoint to fetch for this model and these holders.

    Raises:
        StateError: the checkpoint has no state for a holder, or states that are too large for this model.
    """
    wanted = {f"model.{name}": TensorLayout.of(tensor) for name, tensor in model_tensors(model).items()}
    limit = MAX_COPIES * sum(tensor.nbytes for tensor in model_tensors(model).values()) + SPARE_BYTES
    groups = [name for name, one in holders.items() if one is not None]
    if missing := [name for name in groups if name not in manifest.values]:
        raise StateError(f"the checkpoint of window {manifest.window} has no {missing[0]} state: load it without one")
    prefixes = tuple(f"{group}." for group in ("momentum", *groups))
    others = {name: layout for name, layout in manifest.tensors.items() if name.startswith(prefixes)}
    size = sum(layout.rows * layout.row_bytes for layout in others.values())
    if size > limit:
        raise StateError(
            f"the checkpoint of window {manifest.window} has states of {size} bytes beside the model: at most {limit} "
            "are expected"
        )
    return wanted | others


def read_checkpoint(
    folder: Path, manifest: SnapshotManifest, model: nn.Module, holders: Mapping[str, StateHolder | None]
) -> dict[str, torch.Tensor]:
    """Restore the holders, then the model, from a checked folder; returns the momentum. Blocks.

    Raises:
        StateError: the states do not fit this optimizer or scheduler, or a file can't be read.
    """
    reader = SnapshotReader(folder, manifest)
    mine = model_tensors(model)
    others = {name: layout.empty() for name, layout in manifest.tensors.items() if not name.startswith("model.")}
    for name, tensor in others.items():
        reader.read_into(name, tensor)
    for name, holder in holders.items():
        if holder is not None:
            state = join_state(manifest.values[name], others)
            try:
                holder.load_state_dict(state)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
                raise StateError(f"the checkpoint's {name} does not fit this one: {error!r}"[:300]) from error
    for name, tensor in mine.items():
        reader.read_into(f"model.{name}", tensor.detach())
    momentum = {name.removeprefix("momentum."): one for name, one in others.items() if name.startswith("momentum.")}
    return {name: one.to(mine[name].device) if name in mine else one for name, one in momentum.items()}


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name; a tensor with several names appears under the first."""
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: tensor for name, tensor in state.items() if first[id(tensor)] == name}

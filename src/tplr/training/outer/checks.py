"""Checks of an outer scheme's inputs, before it changes anything."""

from collections.abc import Mapping, Sequence

import torch

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update
from tplr.errors import TrainingError

# An entry above it is as useless as an infinite one; nothing below it overflows while it is packed.
LARGEST_ENTRY = 2.0**60


def check_parameters(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless all parameters are contiguous float32."""
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32 or not parameter.is_contiguous():
            raise ValueError(
                f"{name}: {parameter.dtype}, contiguous {parameter.is_contiguous()}; expected contiguous float32 "
                "(a shorter type loses steps of the learning rate)"
            )


def check_work(tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    """Check what a miner is about to pack.

    Raises:
        TrainingError: an entry is not finite.
        ValueError: tensors are missing, unknown or of another shape.
    """
    if tensors.keys() != parameters.keys():
        raise ValueError(f"tensors {sorted(tensors.keys() ^ parameters.keys())} are missing or unknown")
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            raise ValueError(f"{name}: {tuple(tensor.shape)}, expected {tuple(parameters[name].shape)}")
        # One pass without a copy; NaN fails both comparisons.
        lowest, highest = tensor.aminmax()
        if not (lowest >= -LARGEST_ENTRY and highest <= LARGEST_ENTRY):
            raise TrainingError(f"{name}: training gave values that are not finite; send nothing for this window")


def in_order(updates: Sequence[Update], spec: PayloadSpec) -> list[Update]:
    """One window's updates by ascending uid.

    Raises:
        ValueError: they are of different windows, of one uid twice, or of another layout than ``spec``.
    """
    updates = sorted(updates, key=lambda update: update.uid)
    identities = [(update.window, update.uid, update.spec.layout) for update in updates]
    if len(set(identities)) < len(updates) or len({(window, layout) for window, _, layout in identities}) > 1:
        raise ValueError(f"updates (window, uid, layout) {identities}: expected each uid once, of one window")
    if any(update.spec.layout != spec.layout for update in updates):
        raise ValueError(f"updates of layout {updates[0].spec.layout}; expected {spec.layout}")
    return updates

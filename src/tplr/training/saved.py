"""Tensors of a saved state, checked against the model's parameters."""

from collections.abc import Mapping

import torch

from tplr.errors import StateError


def checked_copies(
    found: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], what: str
) -> dict[str, torch.Tensor]:
    """Copies of ``found`` on the devices of ``parameters``: one for each parameter, or none at all.

    Raises:
        StateError: names, shapes or types differ, or a value is not finite.
    """
    if found and found.keys() != parameters.keys():
        odd = sorted(found.keys() ^ parameters.keys())
        raise StateError(f"{what}: tensors {odd} are missing or unknown: the state is another model's")
    for name, tensor in found.items():
        shape = parameters[name].shape
        if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.isfinite().all():
            raise StateError(
                f"{what}: {name} is {tensor.dtype} {tuple(tensor.shape)}; expected finite float32 {tuple(shape)}"
            )
    return {name: found[name].to(parameters[name].device, copy=True).contiguous() for name in found}

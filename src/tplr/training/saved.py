"""Checks tensors of a saved state against the model's parameters."""

from collections.abc import Mapping

import torch

from tplr.errors import StateError
from tplr.training.parallel import local_rows


def checked_copies(
    found: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], what: str
) -> dict[str, torch.Tensor]:
    """Check ``found``, and return copies on the devices of ``parameters``: one for each parameter, or none at all.

    Over several ranks, ``found`` and the copies are either whole tensors or shards.

    Raises:
        StateError: names, shapes or types differ, or a value is not finite.
    """
    if found and found.keys() != parameters.keys():
        odd = sorted(found.keys() ^ parameters.keys())
        raise StateError(f"{what}: tensors {odd} are missing or unknown: the state is another model's")
    copies = {}
    for name in found:
        tensor, parameter = found[name], parameters[name]
        part, _ = local_rows(tensor)
        if tensor.shape != parameter.shape or tensor.dtype != torch.float32 or not part.isfinite().all():
            raise StateError(
                f"{what}: {name} is {tensor.dtype} {tuple(tensor.shape)}; expected finite float32 "
                f"{tuple(parameter.shape)}"
            )
        copies[name] = tensor.to(parameter.device, copy=True).contiguous()
    return copies

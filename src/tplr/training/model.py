"""Builds the model of a run, with the same initial weights on every node and for every number of ranks.

Weights are drawn module by module, each module with its own seed. No process ever needs the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from tplr.errors import ConfigError
from tplr.hparams import HParams
from tplr.seeds import derive
from tplr.training.device import DEFAULTS, DeviceSettings
from tplr.training.layers import prepare_layers
from tplr.training.normal_numbers import PortableNormal
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext, local_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_model(
    hparams: HParams,
    device: torch.device | str = "cpu",
    parallel: ParallelContext = SINGLE_PROCESS,
    settings: DeviceSettings = DEFAULTS,
    *,
    first_weights: bool = True,
) -> PreTrainedModel:
    """Build a float32 model with the run's initial weights; over several ranks, this rank's shards of it.

    The caller's random state does not change. Peak memory is that of the shards and of the largest module.

    Args:
        first_weights: draw the initial weights, which takes minutes for the largest models. Otherwise all weights are
            NaN until ``set_first_weights`` or a saved state sets them.

    Raises:
        ConfigError: as ``set_first_weights``.
    """
    model = meta_model(hparams)
    prepare_layers(model, settings)
    bfloat16 = settings.gather_bfloat16 and hparams.precision == "bfloat16"
    model = parallel.shard(model, gather_bfloat16=bfloat16)
    model.to_empty(device=device)
    model.tie_weights()  # ``to_empty`` gives each module a separate tensor
    parameters = dict(model.named_parameters())
    set_first_weights(
        parameters | dict(model.named_buffers()) if first_weights else dict(model.named_buffers()), hparams
    )
    for parameter in () if first_weights else parameters.values():
        local_rows(parameter.detach())[0].fill_(torch.nan)
    # No dropout: two nodes must get the same losses from the same batches.
    return model.eval()


def meta_model(hparams: HParams) -> PreTrainedModel:
    """Return the model on the meta device, without memory for its weights."""
    from transformers import AutoModelForCausalLM  # imported here, because it takes seconds

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hparams.model_config_for_transformers())


@torch.no_grad()
def set_first_weights(places: Mapping[str, torch.Tensor], hparams: HParams) -> None:
    """Set parameters and buffers, or this rank's shards of them, to the run's initial values; one module at a time.

    A module draws its weights by the model's own rule, with a stream seeded by ``init_seed`` and the module's name.
    They are drawn on the CPU for every device, and are equal on every processor (``normal_numbers.py``).

    Raises:
        ConfigError: the model's class leaves a weight without an initial value, or draws other than normal numbers.
    """
    model = meta_model(hparams)
    for path, module in model.named_modules():
        wanted = {key: f"{path}.{key}".lstrip(".") for key in (*module._parameters, *module._buffers)}
        wanted = {key: name for key, name in wanted.items() if name in places}  # a tied weight has one name
        if wanted:
            module.to_empty(device="cpu", recurse=False)
            _draw(model, path, module, hparams.init_seed)
            for key, name in wanted.items():
                whole = getattr(module, key)
                if not whole.sum().isfinite():
                    raise ConfigError(f"model: {type(model).__name__} does not initialize {name}; use another model")
                part, rows = local_rows(places[name])
                part.copy_(whole[rows] if whole.dim() else whole)
                del whole  # free this module before the next one is created
            module.to_empty(device="meta", recurse=False)


def _draw(model: PreTrainedModel, path: str, module: torch.nn.Module, init_seed: int) -> None:
    """Draw the initial values of one module's own tensors; NaN if the model's class has no rule for a tensor."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    with PortableNormal(derive("first weights", init_seed, path)):
        model._init_weights(module)

"""Prepares a model's repeated decoder layers for a device: activation checkpointing and compilation.

Parameters keep their names. Apply FSDP after this: its hooks must be outside of both.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tplr.training.device import DeviceSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Operations whose outputs ``selective`` keeps: matrix products and attention, which take most of the time.
KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the repeated layers of a causal language model."""
    layers = model.base_model.layers
    assert isinstance(layers, torch.nn.ModuleList)
    return layers


def prepare_layers(model: PreTrainedModel, settings: DeviceSettings) -> None:
    """Apply the activation checkpointing and compilation of ``settings`` to each layer. Call once."""
    for layer in decoder_layers(model):
        if settings.checkpointing != "none":
            contexts = {"context_fn": _selective_contexts} if settings.checkpointing == "selective" else {}
            # There is no dropout, so no random state to restore.
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, **contexts}
            layer.forward = functools.partial(checkpoint, layer.forward, **options)
        if settings.compile:
            layer.compile(dynamic=False)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

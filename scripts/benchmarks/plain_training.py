"""What ``device.py`` compares a window's training with: plain loops, and torchtitan's Llama."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tplr.hparams import HParams


def compile_layers(layers: Iterable[torch.nn.Module]) -> None:
    for layer in layers:
        layer.compile(dynamic=False)


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def plain_loop(
    model: torch.nn.Module,
    logits: Callable[..., Any],
    loss_of: Callable[..., Any],
    batches: np.ndarray,
    hparams: HParams,
) -> float:
    """Train in a plain loop: no blocks of rows, no check of losses. Returns the mean loss."""
    model.zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for batch in batches:
        ids = torch.from_numpy(batch).to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=hparams.precision == "bfloat16"):
            loss = loss_of(logits(ids), ids)
        loss.backward()
        total += loss.detach()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(len(batches))
    model.zero_grad(set_to_none=True)
    return total.item() / len(batches)


def torchtitan_llama(device: torch.device, hparams: HParams) -> Any:
    """Return torchtitan 0.2.0's Llama with the run's shape and compiled layers; None if it is not installed.

    Only the model's own files are imported: the packages around them need data sets, loggers and Triton.
    """
    found = importlib.util.find_spec("torchtitan")
    if found is None or not found.submodule_search_locations:
        return None
    root = Path(found.submodule_search_locations[0])

    def bare(name: str, **content: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        vars(module).update(content)
        sys.modules[name] = module
        return module

    model_package = "torchtitan.models.llama3.model"
    for name in ("torchtitan", "torchtitan.models", "torchtitan.models.llama3", model_package):
        bare(name)
    for name in ("components", "config", "protocols", "tools"):
        bare(f"torchtitan.{name}")
    job_config = importlib.import_module("torchtitan.config.job_config").JobConfig
    sys.modules["torchtitan.config"].JobConfig = job_config  # pyright: ignore[reportAttributeAccessIssue]
    protocol = importlib.import_module("torchtitan.protocols.model").ModelProtocol
    bare("torchtitan.protocols.train_spec", ModelProtocol=protocol)
    m = hparams.model
    shape = importlib.import_module(f"{model_package}.args").TransformerModelArgs(
        dim=m.hidden_size,
        n_layers=m.num_hidden_layers,
        n_heads=m.num_attention_heads,
        n_kv_heads=m.num_key_value_heads,
        vocab_size=m.vocab_size,
        multiple_of=m.intermediate_size,  # the MLP's width is rounded up to it
        ffn_dim_multiplier=0.01,
        max_seq_len=hparams.sequence_length,
    )
    with torch.device("meta"):
        model = importlib.import_module(f"{model_package}.model").Transformer(shape)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(device)
    compile_layers(model.layers.values())
    return model

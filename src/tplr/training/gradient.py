"""The gradient of one window: the mean over as many batches as the time allows."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaForCausalLM

from tplr.training.loss import batch_loss


@dataclass(frozen=True)
class WindowGradient:
    """Mean gradient, and what it was made from.

    Attributes:
        tensors: float32, by parameter name, each with its parameter's shape. Empty if no batch was done.
        loss: mean over the batches, in nats a token; NaN if no batch was done.
        skipped: batches left out because their loss was not finite.
    """

    tensors: dict[str, torch.Tensor]
    loss: float
    batches: int
    tokens: int
    skipped: int


def window_gradient(
    model: LlamaForCausalLM, batches: Iterable[np.ndarray], *, stop: Callable[[], bool] = lambda: False
) -> WindowGradient:
    """Accumulate over ``batches`` until they end or ``stop()`` says so; asked before each batch.

    The model's weights are not changed; its ``grad`` fields are empty before and after.
    """
    model.zero_grad(set_to_none=True)
    losses: list[float] = []
    tokens = skipped = 0
    for batch in batches:
        if stop():
            break
        loss = batch_loss(model, batch)
        if math.isfinite(value := loss.item()):
            loss.backward()
            losses.append(value)
            tokens += batch.size
        else:
            skipped += 1
    tensors = {
        name: parameter.grad / len(losses)
        for name, parameter in model.named_parameters()
        if losses and parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    mean = sum(losses) / len(losses) if losses else math.nan
    return WindowGradient(tensors, mean, len(losses), tokens, skipped)

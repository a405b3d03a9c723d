"""Mean cross-entropy of a causal language model on batches of token ids.

Shapes: B sequences in a batch, T tokens in a sequence, V entries in the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

Precision = Literal["float32", "bfloat16"]


def batch_loss(model: LlamaForCausalLM, batch: np.ndarray, precision: Precision = "float32") -> torch.Tensor:
    """Mean over all predictions, in nats: a differentiable float32 scalar. Arguments as ``token_losses``."""
    return token_losses(model, batch, precision).mean()


def token_losses(model: LlamaForCausalLM, batch: np.ndarray, precision: Precision) -> torch.Tensor:
    """Cross-entropy of each next-token prediction, in nats: differentiable float32 (B, T - 1).

    Args:
        batch: (B, T) token ids.
        precision: of the model's matrix products (autocast); the cross-entropy itself is float32.
    """
    device = model.device
    ids = torch.as_tensor(np.ascontiguousarray(batch, dtype=np.int64), device=device)  # (B, T)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        logits = model(input_ids=ids).logits  # (B, T, V)
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(batch), -1)


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, batches: np.ndarray, precision: Precision = "float32") -> float:
    """Mean loss over batches, in nats per token.

    Args:
        batches: (batches, B, T) token ids.

    Raises:
        ValueError: no batches.
    """
    if not len(batches):
        raise ValueError("mean_loss: no batches; the pages hold less text than one batch")
    return sum(batch_loss(model, batch, precision).item() for batch in batches) / len(batches)

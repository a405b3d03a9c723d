"""Cross-entropy of a causal language model, computed in blocks so that only some logits exist at a time.

Logits of a whole batch in float32, and their gradient, are larger than the model's other activations: 4 + 4 bytes for
each of B x T x V. Here the last layer and the cross-entropy are computed for blocks of rows; a row is one prediction.
For training, a block's gradient is computed at once, while its logits exist, so nothing is computed twice.

Shapes: B sequences in a batch, T tokens in a sequence, N = B x T rows, d entries of a hidden state, V entries of the
vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from tplr.hparams import Precision
from tplr.training.device import DEFAULTS, DeviceSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_TARGET = -100  # target of a sequence's last token, which has no next token


def batch_loss(
    model: PreTrainedModel,
    batch: np.ndarray | torch.Tensor,
    precision: Precision = "float32",
    settings: DeviceSettings = DEFAULTS,
) -> torch.Tensor:
    """Return the mean over all predictions, in nats: a float32 scalar, differentiable once. See ``token_losses``."""
    if not torch.is_grad_enabled():
        return token_losses(model, batch, precision, settings).mean()
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    options = _HeadOptions(dtype, _logit_limit(model), settings.loss_rows, settings.compile)
    return _run(model, batch, precision, functools.partial(_mean_loss, options=options))


def batch_losses(
    model: PreTrainedModel,
    batch: np.ndarray | torch.Tensor,
    precision: Precision = "float32",
    settings: DeviceSettings = DEFAULTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``batch_loss`` and the individual losses, as ``token_losses``, in one pass instead of two."""
    found: list[torch.Tensor] = []
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    options = _HeadOptions(dtype, _logit_limit(model), settings.loss_rows, settings.compile, found.append)
    mean = _run(model, batch, precision, functools.partial(_mean_loss, options=options))
    return mean, torch.cat(found).view(len(batch), -1)[:, :-1]


@torch.no_grad()
def token_losses(
    model: PreTrainedModel,
    batch: np.ndarray | torch.Tensor,
    precision: Precision = "float32",
    settings: DeviceSettings = DEFAULTS,
) -> torch.Tensor:
    """Return the cross-entropy of each next-token prediction, in nats: float32 (B, T - 1), without a gradient.

    Args:
        batch: (B, T) token ids.
        precision: of the model's matrix products (autocast); the cross-entropy itself is float32.
    """
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    losses = _run(model, batch, precision, functools.partial(_row_losses, rows=settings.loss_rows, dtype=dtype))
    return losses.view(len(batch), -1)[:, :-1]


@torch.inference_mode()
def mean_loss(model: PreTrainedModel, batches: np.ndarray, precision: Precision = "float32") -> float:
    """Return the mean loss over batches, in nats per token.

    Args:
        batches: (batches, B, T) token ids.

    Raises:
        ValueError: no batches.
    """
    if not len(batches):
        raise ValueError("mean_loss: no batches; the pages contain less text than one batch")
    return sum(batch_loss(model, batch, precision).item() for batch in batches) / len(batches)


# Computes losses from the model, hidden states (N, d) and targets (N).
Head = Callable[["PreTrainedModel", torch.Tensor, torch.Tensor], torch.Tensor]


def _run(model: PreTrainedModel, batch: np.ndarray | torch.Tensor, precision: Precision, head: Head) -> torch.Tensor:
    """Compute losses inside the model's own forward pass: only there does FSDP gather the weights of the last layer."""
    ids = torch.as_tensor(batch, dtype=torch.int64, device=model.device)
    model.forward = functools.partial(_forward, model, head)
    try:
        # No cache: a weight is cast once per pass anyway, and a cache would keep all layers' casts until the pass ends.
        bfloat16 = precision == "bfloat16"
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=bfloat16, cache_enabled=False):
            return model(ids)
    finally:
        del model.forward  # restores the class's own method


def _forward(model: PreTrainedModel, head: Head, ids: torch.Tensor) -> torch.Tensor:
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    targets = F.pad(ids[:, 1:], (0, 1), value=NO_TARGET)
    return head(model, hidden.flatten(0, 1), targets.flatten())


def _row_losses(
    model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor, *, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    matrix, limit = _output_layer(model).weight.to(dtype), _logit_limit(model)
    blocks = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat(
        [
            F.cross_entropy(
                _limited(F.linear(states, matrix).float(), limit), wanted, ignore_index=NO_TARGET, reduction="none"
            )
            for states, wanted in blocks
        ]
    )


@dataclass(frozen=True)
class _HeadOptions:
    """Options: ``dtype`` of the matrix products, bound of the logits, rows per block, and whether the loss is compiled.

    ``keep`` is called with the losses of each block's rows, 0 for a row without a target.
    """

    dtype: torch.dtype
    limit: float | None
    rows: int
    compile: bool
    keep: Callable[[torch.Tensor], None] | None = None


def _mean_loss(
    model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor, *, options: _HeadOptions
) -> torch.Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, _output_layer(model).weight, targets, options)


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of ``hidden @ weight.T``; the forward pass also computes the gradients.

    Shapes: hidden (N, d), weight (V, d), targets (N).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: _HeadOptions
    ) -> torch.Tensor:
        matrix = weight.to(options.dtype)
        count = (targets != NO_TARGET).sum()
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        cross_entropy = _compiled_cross_entropy() if options.compile else _cross_entropy
        for block in _blocks(len(hidden), options.rows):
            states = hidden[block].to(options.dtype)
            losses, to_logits = cross_entropy(states @ matrix.T, targets[block], count, options.limit)
            total += losses.sum() / count
            if options.keep:
                options.keep(losses)
            to_hidden[block] = to_logits @ matrix
            to_weight += to_logits.T @ states
            del to_logits  # free it before the next block's logits exist
        ctx.gradients = to_hidden, to_weight.to(weight.dtype)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        to_hidden, to_weight = ctx.gradients
        del ctx.gradients  # scaled in place: there is no second backward pass
        return to_hidden.mul_(scale), to_weight.mul_(scale), None, None


def _cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, count: torch.Tensor, limit: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a block's losses by row in float32, and the gradient of their mean over ``count`` by ``logits``.

    Shapes: ``logits`` and their gradient (rows, V).
    """
    values = _limited(logits.float(), limit)
    counted = targets != NO_TARGET
    chosen = targets.clamp(min=0)[:, None]
    norms = values.logsumexp(dim=1, keepdim=True)
    losses = torch.where(counted, (norms - values.gather(1, chosen))[:, 0], 0.0)
    gradient = (values - norms).exp_()
    gradient -= (torch.arange(values.shape[1], device=values.device) == chosen).to(torch.uint8)
    gradient *= (counted / count)[:, None]
    if limit:
        gradient *= 1 - (values / limit) ** 2
    return losses, gradient.to(logits.dtype)


@functools.cache
def _compiled_cross_entropy() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(_cross_entropy, dynamic=False)


def _blocks(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, rows, size))


def _limited(logits: torch.Tensor, limit: float | None) -> torch.Tensor:
    return torch.tanh(logits / limit) * limit if limit else logits


def _output_layer(model: PreTrainedModel) -> torch.nn.Linear:
    layer = model.get_output_embeddings()
    assert isinstance(layer, torch.nn.Linear)
    assert layer.bias is None
    return layer


def _logit_limit(model: PreTrainedModel) -> float | None:
    """Return the bound on logits that Gemma's configurations can set."""
    return getattr(model.config, "final_logit_softcapping", None)

"""Settings of one machine that change speed and memory use, never values that nodes must agree on.

Results with two settings differ at most by rounding, like those of two kinds of GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """Computation settings of a device; the defaults are those of a CPU.

    Attributes:
        compile: compile the repeated decoder layer and the loss (the first window waits for the compiler).
        checkpointing: activations that the backward pass recomputes. ``none``; ``selective``: all but the outputs of
            matrix products and attention; ``full``: all within a decoder layer.
        loss_rows: number of predictions whose logits are in memory at a time.
        fused_adamw: one kernel for a step of AdamW; otherwise one for each operation on all tensors.
        copy_ahead: copy a batch from pinned memory while the device computes the previous batch; CUDA only.
        gather_bfloat16: over several ranks, gather decoder layers' weights in bfloat16 instead of float32. Matrix
            products use bfloat16 anyway, but norms then use bfloat16 weights, too. No effect with float32 precision.
        offload_weights: keep the weights from before the inner steps in host memory.
        offload_error_feedback: keep the error feedback in host memory.
    """

    compile: bool = False
    checkpointing: Checkpointing = "none"
    loss_rows: int = 1024
    fused_adamw: bool = False
    copy_ahead: bool = False
    gather_bfloat16: bool = False
    offload_weights: bool = False
    offload_error_feedback: bool = False

    @classmethod
    def of(cls, device: torch.device | str, **changes: Any) -> DeviceSettings:
        """Return the defaults for a device's type with ``changes``; None in ``changes`` means the default."""
        given = {name: value for name, value in changes.items() if value is not None}
        return cls(**(_BY_TYPE.get(torch.device(device).type, {}) | given))


_BY_TYPE: dict[str, dict[str, Any]] = {
    "cuda": {
        "compile": True,
        "loss_rows": 4096,
        "fused_adamw": True,
        "copy_ahead": True,
        "gather_bfloat16": True,
    },
}
DEFAULTS = DeviceSettings()


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to host memory. A GPU tensor's copy is pinned, and complete when its stream is synchronized."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)

"""Settings of one machine that change the speed and the memory of its work, never what nodes must agree on.

Results with two settings differ at most by rounding, as those of two kinds of GPU do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """How a device computes; the defaults are those of a CPU.

    Attributes:
        compile: compile the repeated decoder layer and the loss (the first window waits for the compiler).
        checkpointing: activations that a backward pass computes again: none of them; ``selective``: all but the outputs
            of matrix products and of attention; ``full``: all within a decoder layer.
        loss_rows: predictions whose logits exist at the same time.
        fused_adamw: one kernel for a step of AdamW; otherwise one for each operation on all tensors.
        copy_ahead: copy a batch from pinned memory while the batch before it computes; CUDA only.
        gather_bfloat16: over several ranks, gather the weights of decoder layers in bfloat16, which matrix products use
            anyway, instead of float32; norms then see their weights in bfloat16, too. No effect with float32 precision.
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
        """The defaults for a device's type, and ``changes``; a change to None is the default."""
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
    """A copy in host memory; of a tensor on a GPU in pinned memory, complete when its stream has come to it."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)

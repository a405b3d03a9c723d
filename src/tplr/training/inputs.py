"""Moves a window's batches to the training device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch


def device_batches(batches: np.ndarray, device: torch.device, *, ahead: bool) -> Iterator[torch.Tensor]:
    """Yield each batch as int64 (B, T) on ``device``.

    Args:
        batches: (batches, B, T) token ids.
        ahead: on CUDA, copy each batch from pinned memory on a separate stream, while the previous batch computes.
    """
    host = (torch.as_tensor(np.ascontiguousarray(batch, dtype=np.int64)) for batch in batches)
    if not (ahead and device.type == "cuda"):
        yield from (batch.to(device) for batch in host)
        return
    stream = torch.cuda.Stream(device)
    copied = _copies(host, device, stream)
    following = next(copied, None)
    while following is not None:
        batch = following
        torch.cuda.current_stream(device).wait_stream(stream)
        batch.record_stream(torch.cuda.current_stream(device))
        following = next(copied, None)
        yield batch


def _copies(host: Iterator[torch.Tensor], device: torch.device, stream: torch.cuda.Stream) -> Iterator[torch.Tensor]:
    for batch in host:
        with torch.cuda.stream(stream):
            copy = batch.pin_memory().to(device, non_blocking=True)
        yield copy

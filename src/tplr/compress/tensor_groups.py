"""Groups tensors of one shape to process them together: for a small tensor, starting an operation costs the most."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from tplr.compress.chunks import ROW_BLOCK_ENTRIES, ChunkGrid
from tplr.compress.layout import PayloadSpec, TensorSpec


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one shape, stacked row-wise into one matrix: several with at most a row block of entries, or one."""

    tensors: tuple[TensorSpec, ...]

    @property
    def grid(self) -> ChunkGrid:
        """Grid of the stacked matrix."""
        return self.tensors[0].grid.stacked(len(self.tensors))

    @property
    def k(self) -> int:
        """Number of entries sent for each chunk."""
        return self.tensors[0].k

    @property
    def grouped(self) -> bool:
        """Whether the sent entries are one from each of k groups (``interleaved.py``)."""
        return self.tensors[0].grouped

    def band_views(self, data: Mapping[str, torch.Tensor], bands: slice) -> list[torch.Tensor]:
        """Return views [bands, chunk rows, cols] of bands of the stacked matrix: one tensor's, or all tensors'."""
        grid = self.tensors[0].grid
        views = [grid.view(data[tensor.name]) for tensor in self.tensors]
        return views if len(views) > 1 else [views[0][bands]]

    def cut(self, data: Mapping[str, torch.Tensor], bands: slice) -> torch.Tensor:
        """Copy these bands, chunk by chunk: [chunks, entries]."""
        grid, one = self.tensors[0].grid, data[self.tensors[0].name]
        count = (bands.stop - bands.start) * (grid.cols // grid.chunk_cols)
        chunks = torch.empty(count, grid.entries, dtype=one.dtype, device=one.device)
        for blocks, part in self._block_pairs(data, bands, chunks):
            part.copy_(blocks)
        return chunks

    def add(self, data: Mapping[str, torch.Tensor], bands: slice, chunks: torch.Tensor, *, alpha: float) -> None:
        """Add ``alpha * chunks``, [chunks, entries], to these bands, in place."""
        for blocks, part in self._block_pairs(data, bands, chunks):
            blocks.add_(part, alpha=alpha)

    def _block_pairs(
        self, data: Mapping[str, torch.Tensor], bands: slice, chunks: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor's bands and its part of ``chunks``, as views [bands, across, chunk rows, chunk cols]."""
        grid = self.tensors[0].grid
        for view, part in zip(self.band_views(data, bands), self.split(chunks), strict=True):
            blocks = grid.blocks(view)
            yield blocks, part.view(blocks.shape)

    def split(self, joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split rows or chunks of all tensors into one part for each tensor."""
        return joined.split(len(joined) // len(self.tensors))


def tensor_groups(
    spec: PayloadSpec, device: torch.device, names: Collection[str] | None = None
) -> Iterator[TensorGroup]:
    """Group all tensors of a run, or those of ``names``; a group has at most a row block's entries, or one tensor."""
    by_shape: dict[tuple[int, ...], list[TensorSpec]] = {}
    for name in spec.tensors if names is None else filter(set(names).__contains__, spec.tensors):
        tensor = spec.tensors[name]
        by_shape.setdefault(tensor.grid.shape, []).append(tensor)
    for tensors in by_shape.values():
        at_once = max(1, ROW_BLOCK_ENTRIES[device.type] // (tensors[0].grid.rows * tensors[0].grid.cols))
        for start in range(0, len(tensors), at_once):
            yield TensorGroup(tuple(tensors[start : start + at_once]))

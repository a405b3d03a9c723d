"""Tensors of one shape that are worked on as one: on a small tensor, starting an operation costs more than its work."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tplr.compress.chunks import SLAB_ENTRIES, ChunkGrid
from tplr.compress.layout import PayloadSpec, TensorPlace


@dataclass(frozen=True)
class Batch:
    """Tensors of one shape, their matrices on top of each other: together at most a slab, or a larger one alone."""

    places: tuple[TensorPlace, ...]

    @property
    def grid(self) -> ChunkGrid:
        """Of the whole matrix."""
        return self.places[0].grid.stacked(len(self.places))

    @property
    def k(self) -> int:
        """How many entries of each chunk travel."""
        return self.places[0].k

    def bands(self, tensors: Mapping[str, torch.Tensor], rows: slice) -> list[torch.Tensor]:
        """Views of the parts of ``tensors`` that these rows of the matrix are: of one tensor, or all of each."""
        grid = self.places[0].grid
        matrices = [tensors[place.name].view(grid.rows, grid.cols) for place in self.places]
        return matrices if len(matrices) > 1 else [matrices[0][rows]]

    def cut(self, tensors: Mapping[str, torch.Tensor], rows: slice) -> torch.Tensor:
        """A copy of these rows, chunk by chunk: [chunks, entries]."""
        grid, one = self.places[0].grid, tensors[self.places[0].name]
        count = (rows.stop - rows.start) * grid.cols // grid.entries
        chunks = torch.empty(count, grid.entries, dtype=one.dtype, device=one.device)
        for blocks, part in self._beside(tensors, rows, chunks):
            part.copy_(blocks)
        return chunks

    def add(self, tensors: Mapping[str, torch.Tensor], rows: slice, chunks: torch.Tensor, *, alpha: float) -> None:
        """Add ``alpha * chunks`` ([chunks, entries]) to these rows, in place."""
        for blocks, part in self._beside(tensors, rows, chunks):
            blocks.add_(part, alpha=alpha)

    def _beside(
        self, tensors: Mapping[str, torch.Tensor], rows: slice, chunks: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A view of each tensor's rows, chunk by chunk, and its part of ``chunks``.

        Both are [chunks down, chunks across, chunk rows, chunk cols].
        """
        grid = self.places[0].grid
        for band, part in zip(self.bands(tensors, rows), self.parts(chunks), strict=True):
            blocks = grid.blocks(band)
            yield blocks, part.view(blocks.shape)

    def parts(self, joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut what was computed for rows or chunks of all tensors into one part for each tensor."""
        return joined.split(len(joined) // len(self.places))


def batches(spec: PayloadSpec, device: torch.device) -> Iterator[Batch]:
    """All tensors of a run, each once."""
    alike: dict[tuple[int, ...], list[TensorPlace]] = {}
    for place in spec.tensors.values():
        alike.setdefault(place.grid.shape, []).append(place)
    for places in alike.values():
        at_once = max(1, SLAB_ENTRIES[device.type] // (places[0].grid.rows * places[0].grid.cols))
        for start in range(0, len(places), at_once):
            yield Batch(tuple(places[start : start + at_once]))

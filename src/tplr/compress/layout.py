"""Byte layout of an update; it follows from parameter shapes and settings alone.

An update is a safetensors file of four flat sections, and its size is known to the byte before it is fetched:

==========  =======  ==============================================================================================
section     type     content
==========  =======  ==============================================================================================
codebooks   float32  ``2**bits`` entries for each tensor (``quantize.py``); empty if values are not quantized
values      uint8    codes of each tensor, chunk by chunk (float32 if values are not quantized)
scales      uint8    a byte for each chunk; empty if values are not quantized, or have one scale for each tensor
indices     uint8    rows of each tensor: Elias–Fano (``elias_fano.py``), or one of each group (``interleaved.py``);
                     empty for a dense tensor
==========  =======  ==============================================================================================

In a section, tensors are ordered by name (code points), and each starts at a whole byte.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tplr.compress import elias_fano, interleaved
from tplr.compress.bits import packed_size
from tplr.compress.chunks import ChunkGrid
from tplr.compress.quantize import Codebook, Quantizer, Rounding, Scale
from tplr.hparams import HParams

# Identifies the layout and the codec: a change to either changes this name.
FORMAT = "tplr-update-4"

# Digits of the layout's hash. They suffice to distinguish layouts; a collision helps nobody, as readers use their own.
LAYOUT_DIGITS = 32

Selection = Literal["chunk", "group"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor in an update.

    Attributes:
        k: number of entries sent for each chunk; all of them in a dense tensor.
        grouped: whether the sent entries are one from each of k groups.
        codebook, values, scales, indices: slices of the object's bytes.
    """

    name: str
    grid: ChunkGrid
    k: int
    grouped: bool
    codebook: slice
    values: slice
    scales: slice
    indices: slice

    @property
    def sections(self) -> tuple[slice, ...]:
        """All of the tensor's slices, which may be empty."""
        return self.codebook, self.values, self.scales, self.indices

    @property
    def dense(self) -> bool:
        """Whether every entry is sent, so that no index is needed."""
        return self.k == self.grid.entries


@dataclass(frozen=True)
class PayloadSpec:
    """The layout of all updates of a run.

    Attributes:
        outer: name of the outer scheme.
        quantizer: quantizer of the values; None for float32.
        tensors: by name, in the order of the bytes.
        expected_size: size of the whole object, in bytes.
        layout: 32 digits of the SHA-256 over everything that determines the layout; equal specs have equal hashes.
        head, tail: bytes of the header before and after the metadata.
    """

    outer: str
    quantizer: Quantizer | None
    tensors: Mapping[str, TensorSpec] = field(repr=False, compare=False)
    expected_size: int
    layout: str
    head: bytes = field(repr=False)
    tail: bytes = field(repr=False)

    @classmethod
    def from_hparams(cls, shapes: Mapping[str, Sequence[int]], hparams: HParams) -> "PayloadSpec":
        """Return the layout of a run's updates. Raises ValueError as ``of``."""
        return cls.of(
            shapes,
            outer=hparams.outer,
            target_chunk=hparams.target_chunk,
            topk=hparams.topk_compression,
            selection=hparams.topk_selection,
            bits=hparams.quantization_bits,
            scale=hparams.quantization_scale,
            codebook=hparams.quantization_codebook,
            rounding=hparams.quantization_rounding,
        )

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Sequence[int]],
        *,
        outer: str,
        target_chunk: int,
        topk: int,
        bits: int,
        selection: Selection = "chunk",
        scale: Scale = "chunk",
        codebook: Codebook = "lloyd",
        rounding: Rounding = "nearest",
    ) -> "PayloadSpec":
        """Return the layout for parameters with these shapes; their order does not matter.

        Args:
            topk: number of entries sent for each chunk.
            selection: ``chunk``: the largest entries of the chunk; ``group``: the largest entry of each of ``topk``
                groups, or of more groups whose size is a power of two, and the rows of a chunk are spread over the
                matrix.
            bits: number of bits of a value: 1, 2, 4 or 8, or 0 for float32.
            scale, codebook, rounding: see ``Quantizer``.

        Raises:
            ValueError: no shapes, a tensor without entries, or a setting out of range.
        """
        if not shapes or target_chunk < 1 or topk < 1 or bits not in (0, 1, 2, 4, 8):
            raise ValueError(
                f"{len(shapes)} shapes, target_chunk {target_chunk}, topk {topk}, bits {bits}: expected at least one "
                "shape, positive target_chunk and topk, and bits of 0, 1, 2, 4 or 8"
            )
        quantizer = Quantizer(bits, scale, codebook, rounding) if bits else None
        grouped = selection == "group"
        grids = {name: ChunkGrid.of(shapes[name], target_chunk, spread=grouped) for name in sorted(shapes)}
        kept = {name: entries_kept(grid.entries, topk, bits, grouped=grouped) for name, grid in grids.items()}
        sizes = {name: _SectionSizes.of(grid, kept[name], quantizer, grouped=grouped) for name, grid in grids.items()}
        totals = _SectionSizes(*map(sum, zip(*sizes.values(), strict=True)))

        cut = [[name, grid.shape] for name, grid in grids.items()]
        rules = [FORMAT, outer, target_chunk, topk, selection, bits, scale, cut]
        layout = hashlib.sha256(json.dumps(rules, separators=(",", ":")).encode()).hexdigest()[:LAYOUT_DIGITS]
        head = f'{{"__metadata__":{{"format":"{FORMAT}","layout":"{layout}",'.encode()
        tail = _describe_sections(totals, bits).encode()
        # The safetensors library expects the data to start at a multiple of eight.
        tail += b" " * (-(len(head) + len(_metadata(0, 0, "0" * 64, 0)) + len(tail)) % 8)
        data_start = 8 + len(head) + len(_metadata(0, 0, "0" * 64, 0)) + len(tail)

        tensors: dict[str, TensorSpec] = {}
        starts = [data_start + sum(totals[:section]) for section in range(len(totals))]
        for name, grid in grids.items():
            ends = [start + size for start, size in zip(starts, sizes[name], strict=True)]
            tensors[name] = TensorSpec(name, grid, kept[name], grouped, *map(slice, starts, ends))
            starts = ends
        return cls(outer, quantizer, tensors, data_start + sum(totals), layout, head, tail)

    @property
    def bits(self) -> int:
        """Number of bits of a value; 0 for float32."""
        return self.quantizer.bits if self.quantizer else 0

    @property
    def data_start(self) -> int:
        """Number of bytes before the sections: the header's length (8 bytes) and the header."""
        return 8 + len(self.head) + len(_metadata(0, 0, "0" * 64, 0)) + len(self.tail)

    def prologue(self, *, window: int, uid: int, pages_digest: str, batches: int) -> bytes:
        """Return all bytes before the sections."""
        metadata = _metadata(window, uid, pages_digest, batches)
        return (self.data_start - 8).to_bytes(8, "little") + self.head + metadata + self.tail


def entries_kept(entries: int, topk: int, bits: int, *, grouped: bool = False) -> int:
    """Return the number of entries sent per chunk: ``topk``, or all if dense encoding, without indices, is not larger.

    If ``grouped``, it is the number of groups.
    """
    k, width = min(topk, entries), bits or 32
    k = interleaved.group_count(entries, k) if grouped else k
    return entries if entries * width <= k * width + index_code(grouped=grouped).bits_per_row(entries, k) else k


def index_code(*, grouped: bool):  # noqa: ANN201 - one of two modules with the same functions
    """Return the module that codes indices: ``interleaved`` or ``elias_fano``."""
    return interleaved if grouped else elias_fano


class _SectionSizes(NamedTuple):
    """Bytes in each section, in the order of the sections."""

    codebooks: int
    values: int
    scales: int
    indices: int

    @classmethod
    def of(cls, grid: ChunkGrid, k: int, quantizer: Quantizer | None, *, grouped: bool) -> "_SectionSizes":
        """Return the sizes for one tensor."""
        of_row = 0 if k == grid.entries else index_code(grouped=grouped).bits_per_row(grid.entries, k)
        return cls(
            codebooks=4 * 2**quantizer.bits if quantizer else 0,
            values=packed_size(grid.chunks * k, quantizer.bits) if quantizer else 4 * grid.chunks * k,
            scales=grid.chunks if quantizer and quantizer.scale == "chunk" else 0,
            indices=packed_size(grid.chunks * of_row, 1),
        )


def _describe_sections(totals: _SectionSizes, bits: int) -> str:
    text, start = "", 0
    dtypes = {"codebooks": "F32", "values": "U8" if bits else "F32", "scales": "U8", "indices": "U8"}
    for section, size in totals._asdict().items():
        dtype = dtypes[section]
        count = size // 4 if dtype == "F32" else size
        text += f',"{section}":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[{start},{start + size}]}}'
        start += size
    return text + "}"


def _metadata(window: int, uid: int, pages_digest: str, batches: int) -> bytes:
    """Return the fields that differ between updates, with a fixed width; ``payload.py`` reads them."""
    return (
        f'"window":"{window:016d}","uid":"{uid:05d}","pages":"{pages_digest}","batches":"{batches:010d}"}}'
    ).encode()

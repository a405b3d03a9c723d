"""Writes a model's tensors into sharded safetensors files, in blocks of rows: no tensor is copied whole."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tplr.direct_io import UncachedWriter
from tplr.exchange.snapshot import TensorLayout
from tplr.files import atomic_write, atomic_writer
from tplr.training.rows import row_blocks

ExportDtype = Literal["float32", "bfloat16"]
CODES: dict[ExportDtype, Literal["F32", "BF16"]] = {"float32": "F32", "bfloat16": "BF16"}
TORCH_DTYPES: dict[ExportDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_SHARD_BYTES = 5 * 10**9
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Shard:
    """Tensors of one file, in their order in it."""

    layouts: dict[str, TensorLayout]

    @property
    def data_bytes(self) -> int:
        return sum(_bytes(layout) for layout in self.layouts.values())

    @property
    def head(self) -> bytes:
        """Return the safetensors header, preceded by its length; readers of earlier versions require the format."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, layout in self.layouts.items():
            end = start + _bytes(layout)
            header[name] = {"dtype": layout.dtype, "shape": layout.shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def write_weights(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, TensorLayout],
    dtype: ExportDtype = "float32",
    *,
    max_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write the tensors, in the order of their names, as ``transformers`` reads them. Blocks.

    Args:
        tensors: by name; tensors on disk are read in blocks of rows.
        layouts: layouts of ``tensors``.
        dtype: type in the files; float32 is rounded to bfloat16 to nearest, ties to even.
        max_bytes: maximum size of the tensors of one file, unless a single tensor is larger.

    Returns:
        The files' names: one, or several with an index beside them.

    Raises:
        StateError: the disk is full, or a tensor can't be read.
    """
    shards = _shards({name: _as(layouts[name], dtype) for name in sorted(layouts)}, max_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE_FILE]
    for name, shard in zip(names, shards, strict=True):
        with atomic_writer(folder / name) as file:
            writer = UncachedWriter(file)
            writer.write(shard.head)
            for tensor in shard.layouts:
                for rows in row_blocks(tensors, tensor):
                    writer.write(_bytes_as(rows, TORCH_DTYPES[dtype]))
            writer.finish()
    if len(shards) > 1:
        place = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard.layouts}
        index = {"metadata": {"total_size": sum(shard.data_bytes for shard in shards)}, "weight_map": place}
        atomic_write(folder / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
    return names


def weight_files(folder: Path) -> list[Path]:
    """Return the files of ``write_weights`` in a folder."""
    return sorted(folder.glob("model*.safetensors"))


def _shards(layouts: Mapping[str, TensorLayout], max_bytes: int) -> list[_Shard]:
    shards = [_Shard({})]
    for name, layout in layouts.items():
        if shards[-1].layouts and shards[-1].data_bytes + _bytes(layout) > max_bytes:
            shards.append(_Shard({}))
        shards[-1].layouts[name] = layout
    return shards


def _as(layout: TensorLayout, dtype: ExportDtype) -> TensorLayout:
    return TensorLayout(dtype=CODES[dtype], shape=layout.shape)


def _bytes(layout: TensorLayout) -> int:
    return layout.rows * layout.row_bytes


def _bytes_as(rows: torch.Tensor, dtype: torch.dtype) -> memoryview:
    return rows.to("cpu", dtype).contiguous().view(torch.uint8).reshape(-1).numpy().data

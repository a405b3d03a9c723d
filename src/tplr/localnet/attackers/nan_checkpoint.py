"""Writes a complete and well-formed checkpoint in which every weight is NaN."""

import math
from pathlib import Path

import torch

from tplr.exchange.snapshot import DTYPES, ShardWriter, SnapshotManifest


def write_nan_shards(folder: Path, manifest: SnapshotManifest) -> SnapshotManifest:
    """Write the shards of a snapshot with the same tensors, their floating-point entries NaN, and return its manifest.

    Integers are 0. Blocks.
    """
    tensors = {}
    for name, layout in manifest.tensors.items():
        value = math.nan if DTYPES[layout.dtype].is_floating_point else 0
        tensors[name] = torch.full(layout.shape, value, dtype=DTYPES[layout.dtype])
    writer = ShardWriter(folder)
    writer.write(tensors)
    return manifest.model_copy(update={"shards": tuple(writer.shards)}).sealed()

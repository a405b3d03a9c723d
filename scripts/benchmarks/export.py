"""Measures memory and time of streaming an export of a model of a billion parameters from a checkpoint's files.

Writes a snapshot of random weights like a node (4.9 GB). A separate process then computes an export's fingerprint,
digest, and files. Reports the peak resident memory of that process above its memory at the start, and the size of the
largest tensor.

    python scripts/benchmarks/export.py --folder FOLDER --csv docs/benchmarks/export.csv
"""

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tplr.exchange.snapshot import ShardWriter, SnapshotManifest, TensorLayout, write_manifest
from tplr.hparams import HParams
from tplr.localnet.plan import scheme_constants
from tplr.node.state import SavedState
from tplr.run.folder import model_layouts
from tplr.run.weights import write_weights
from tplr.training.fingerprint import digest, fingerprint

# The shape of a published model of 1.24 billion parameters, with tied embeddings.
MODEL = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
DTYPES = ("float32", "bfloat16")


class RandomTensors(Mapping[str, torch.Tensor]):
    """Tensors that are drawn at each access and not kept."""

    def __init__(self, layouts: Mapping[str, TensorLayout]) -> None:
        self._layouts = layouts

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.randn(self._layouts[name].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)


def layouts() -> dict[str, TensorLayout]:
    raw = scheme_constants("demo")
    return model_layouts(HParams.model_validate(raw | {"model": MODEL}))


def write_snapshot(folder: Path) -> None:
    """Write one tensor at a time, like a node."""
    found = layouts()
    tensors = RandomTensors(found)
    writer, shards = None, []
    for name in found:
        writer = ShardWriter(folder, rank=len(shards))
        writer.write({f"model.{name}": tensors[name]})
        shards += writer.shards
    manifest = SnapshotManifest(
        window=1,
        start_window=0,
        global_step=1,
        version="1",
        values={},
        tensors={f"model.{name}": one for name, one in found.items()},
        shards=tuple(shards),
    )
    write_manifest(folder, manifest)


def memory(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (largest so far) of this process, in bytes; ``getrusage`` counts the parent's."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1])


def export(snapshot: Path, out: Path, dtype: str) -> dict[str, float]:
    """Export in this process; sizes in bytes."""
    manifest = SnapshotManifest.model_validate_json((snapshot / "manifest.json").read_bytes())
    found = layouts()
    tensors = SavedState(snapshot, manifest).lazily("model")
    out.mkdir()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, began = memory("VmRSS"), time.monotonic()
    fingerprint(tensors, step=1, seed=1, samples=256)
    digest(tensors)
    write_weights(out, tensors, found, "float32" if dtype == "float32" else "bfloat16")
    sizes = [one.rows * one.row_bytes for one in found.values()]
    return {
        "parameters": sum(sizes) // 4,
        "model_bytes": sum(sizes),
        "largest_tensor_bytes": max(sizes),
        "peak_above_start_bytes": memory("VmHWM") - before,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where 13 GB are free (default: a temporary folder)")
    parser.add_argument("--csv", type=Path, help="write the figures here")
    parser.add_argument("--export", nargs=3, metavar=("SNAPSHOT", "OUT", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.export:
        print(json.dumps(export(Path(args.export[0]), Path(args.export[1]), args.export[2])))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        snapshot = Path(folder) / "snapshot"
        write_snapshot(snapshot)
        for dtype in DTYPES:
            command = [sys.executable, __file__, "--export", snapshot, Path(folder) / dtype, dtype]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append({"dtype": dtype} | json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()

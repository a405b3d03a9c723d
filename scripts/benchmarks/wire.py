"""Measures the size of updates as whole files, against the lower bound of their indices; and compares quantizers.

The first table builds updates, writes them and measures the files. The bound is ``log2(binomial(n, k)) / k`` bits per
index of a chunk with n entries, of which k are sent. The second table compares quantizers at equal bytes: each gets the
largest k that fits. Twenty gradients (for ``demo``), or differences of weights (``sparseloco``), of a small Llama on
Python's own sources are sent one after the other; the measure is the remaining error feedback, relative to their sum.

    python scripts/benchmarks/wire.py

Writes ``docs/benchmarks/wire.csv``, ``wire_quantizers.csv`` and ``wire.png``.
"""

import argparse
import csv
import itertools
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import redraw

from tplr.compress.aggregate import weighted_sums
from tplr.compress.dct import inverse, transform
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Coefficients, build, decode_all, parse
from tplr.compress.topk import top_k

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
META = {"window": 1, "uid": 0, "pages_digest": "0" * 64, "batches": 1}
CHUNK = 64
SCHEMES = ("demo", "sparseloco")
TOPK = (16, 32, 64, 128)
BITS = (1, 2, 4, 8, 0)
# Bits for each parameter that a quantizer may spend: k = 32 and k = 64 with 2 bits and chunk scales.
BUDGETS = (0.0865, 0.1575)
WINDOWS = 20
INNER_STEPS = 5  # of AdamW in one of SparseLoCo's windows

Shapes = Mapping[str, Sequence[int]]


def llama_150m() -> Shapes:
    """Return the parameters of a Llama with 152 million parameters, by transformers' names and shapes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2688, num_hidden_layers=12, num_attention_heads=12
    )
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in LlamaForCausalLM(config).named_parameters()}


# --- files -----------------------------------------------------------------------------------------------------------


def random_update(spec: PayloadSpec) -> bytes:
    """Return coefficients at random positions; sizes do not depend on the values."""
    generator = torch.Generator().manual_seed(1)
    made: dict[str, Coefficients] = {}
    for name, tensor in spec.tensors.items():
        grid, k = tensor.grid, tensor.k
        # Strictly increasing: the numbers 0, 1, ... plus a non-decreasing sequence.
        steps = torch.randint(grid.entries - k + 1, (grid.chunks, k), generator=generator, dtype=torch.int32)
        indices = steps.sort(dim=1).values + torch.arange(k)
        made[name] = indices, torch.randn(grid.chunks, k, generator=generator)
    return build(made, spec, **META)


def weigh(shapes: Shapes, outer: str, k: int, bits: int) -> dict[str, Any]:
    """Return one row of the first table."""
    spec = PayloadSpec.of(shapes, outer=outer, target_chunk=CHUNK, topk=k, bits=bits)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update.safetensors"
        path.write_bytes(random_update(spec))
        size = path.stat().st_size
        parse(path.read_bytes(), spec, window=1, uid=0)
    assert size == spec.expected_size
    full = [tensor for tensor in spec.tensors.values() if tensor.grid.entries == CHUNK**2]
    indices = sum(tensor.grid.chunks * tensor.k for tensor in full)
    sections = {
        part: sum(len(range(*getattr(tensor, part).indices(size))) for tensor in spec.tensors.values())
        for part in ("codebook", "values", "scales", "indices")
    }
    return {
        "outer": outer,
        "k": k,
        "value bits": bits or 32,
        "file bytes": size,
        "bits per parameter": 8 * size / sum(math.prod(shape) for shape in shapes.values()),
        "bits per index": 8 * sum(len(range(*tensor.indices.indices(size))) for tensor in full) / indices,
        "bound per index": math.log2(math.comb(CHUNK**2, k)) / k,
        "16-bit indices, float32 values": (16 + 32) * k / CHUNK**2,
        **{f"{part} bytes": count for part, count in sections.items()},
        "header bytes": size - sum(sections.values()),
    }


# --- quantizers ------------------------------------------------------------------------------------------------------


def recorded(outer: str) -> list[dict[str, torch.Tensor]]:
    """Return the tensors to send of the matrices of a Llama of a million parameters, window by window, while AdamW
    trains it on Python's own sources, byte by byte: gradients, or for SparseLoCo the change by a few steps. Only
    matrices, because a large model consists of matrices."""
    from transformers import LlamaConfig, LlamaForCausalLM

    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(2)
    found: list[dict[str, torch.Tensor]] = []
    for window in range(3 * WINDOWS):
        matrices = {name: one for name, one in model.named_parameters() if one.dim() > 1}
        before = {name: one.detach().clone() for name, one in matrices.items()}
        gradients: dict[str, torch.Tensor] = {}
        for _ in range(1 if outer == "demo" else INNER_STEPS):
            starts = torch.randint(len(data) - 128, (16,), generator=generator)
            batch = torch.stack([data[start : start + 128] for start in starts.tolist()])
            model(input_ids=batch, labels=batch).loss.backward()
            gradients = {name: one.grad for name, one in matrices.items() if one.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        if window >= 2 * WINDOWS:
            differences = {name: before[name] - one.detach() for name, one in matrices.items()}
            found.append(gradients if outer == "demo" else differences)
    return found


def spec_within(shapes: Shapes, budget: float, outer: str, **settings: Any) -> PayloadSpec | None:
    """Return the largest k with files of at most ``budget`` bits per parameter, without header; None if there is
    none."""
    count = sum(math.prod(shape) for shape in shapes.values())
    best = None
    for k in range(1, CHUNK**2):
        spec = PayloadSpec.of(shapes, outer=outer, target_chunk=CHUNK, topk=k, **settings)
        if 8 * (spec.expected_size - spec.data_start) > budget * count:
            return best
        best = spec
    return best


@torch.no_grad()
def left_unsent(work: list[dict[str, torch.Tensor]], spec: PayloadSpec) -> tuple[float, float]:
    """Return the unsent part of the first window alone and of all windows together: its norm over the total norm."""
    error = {name: torch.zeros_like(one) for name, one in work[0].items()}
    first, dct = 0.0, spec.outer == "demo"
    for window, tensors in enumerate(work):
        kept = {}
        for name, tensor in spec.tensors.items():
            error[name] += tensors[name]
            chunks = tensor.grid.cut(tensor.grid.view(error[name]))
            kept[name] = top_k(transform(chunks, tensor.grid) if dct else chunks, tensor.k)
        update = parse(build(kept, spec, **META), spec, window=1, uid=0)
        for name, tensor in spec.tensors.items():
            for bands, total in weighted_sums(decode_all([update], [tensor]), [1.0], tensor.grid):
                sent = inverse(total.float(), tensor.grid) if dct else total.float()
                tensor.grid.view(error[name])[bands] -= tensor.grid.join(sent)
        if not window:
            first = _norm(error) / _norm(tensors)
    whole = {name: sum((tensors[name] for tensors in work), torch.zeros(())) for name in error}
    return first, _norm(error) / _norm(whole)


def _norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(one.double().square().sum().item() for one in tensors.values()))


def compare_quantizers() -> list[dict[str, Any]]:
    """Return the rows of the second table, with the best row of each scheme and budget first."""
    rows: list[dict[str, Any]] = []
    for outer in SCHEMES:
        work = recorded(outer)
        shapes = {name: tuple(one.shape) for name, one in work[0].items()}
        choices = itertools.product((1, 2, 4, 8), ("chunk", "tensor"), ("lloyd", "bins"), ("nearest", "stochastic"))
        for budget, (bits, scale, codebook, rounding) in itertools.product(BUDGETS, [*choices, (0, "", "", "")]):
            names = {"scale": scale, "codebook": codebook, "rounding": rounding}
            spec = spec_within(shapes, budget, outer, bits=bits, **(names if bits else {}))
            if spec is None:
                continue
            k = next(tensor.k for tensor in spec.tensors.values() if not tensor.dense)
            first, all_windows = left_unsent(work, spec)
            row = {"outer": outer, "budget": budget, "value bits": bits or 32, **names, "k": k}
            rows.append(row | {"left of one": first, "left after all": all_windows})
    return sorted(rows, key=lambda row: (row["outer"], row["budget"], row["left after all"]))


# --- output ----------------------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    widths = {key: max(len(key), 10) for key in rows[0]}
    print("  ".join(f"{key:>{width}}" for key, width in widths.items()))
    for row in rows:
        cells = {key: f"{value:.4f}" if isinstance(value, float) else str(value) for key, value in row.items()}
        print("  ".join(f"{cells[key]:>{width}}" for key, width in widths.items()))


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a table as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.5f}" if isinstance(value, float) else value for key, value in row.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    shapes = llama_150m()
    print(f"{sum(math.prod(shape) for shape in shapes.values()) / 1e6:.1f} million parameters")
    sizes = [weigh(shapes, *choice) for choice in itertools.product(SCHEMES, TOPK, BITS)]
    show(sizes)
    quantizers = compare_quantizers()
    show(quantizers)
    FOLDER.mkdir(parents=True, exist_ok=True)
    write(sizes, FOLDER / "wire.csv")
    write(quantizers, FOLDER / "wire_quantizers.csv")
    redraw("wire")


if __name__ == "__main__":
    main()

"""Measures time and memory for encoding, aggregating and restoring updates on one core, against two baselines.

``plain`` is the documented method in a few lines, tensor by tensor: an einsum for the DCT, top-k, the scatter-mean of
all peers' concatenated coefficients, an inverse DCT. ``limit`` is a lower bound for an encoder that needs these
products and a ranking of all coefficients: two batched matrix products of contiguous chunks and one contiguous top-k,
without cutting or packing. Runs alternate, so that a busy machine slows all of them equally. Ratios are within one
repetition.

    python scripts/benchmarks/compress.py [--repetitions 5] [--sizes 15 150]

Writes ``docs/benchmarks/compress.csv`` and ``compress.png``.
"""

import argparse
import csv
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from pictures import redraw

from tplr.compress.aggregate import scatter_sum
from tplr.compress.chunks import ChunkGrid
from tplr.compress.dct import basis, inverse, transform
from tplr.compress.payload import Coefficients, build, decode_all, parse
from tplr.compress.tensor_groups import tensor_groups
from tplr.compress.topk import top_k
from tplr.hparams import load_hparams
from tplr.training.outer.demo import DemoOuter, by_tensor, largest_coefficients

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
PEERS = 15
K = 32
LR, DECAY = 4e-4, 0.999
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
META = {"window": 1, "pages_digest": "0" * 64, "batches": 1}
# Millions of parameters: vocabulary, width, width of the feed-forward layers, layers.
SIZES = {15: (16_000, 256, 1024, 6), 150: (32_000, 768, 2688, 12)}
TARGETS = {("encode", "limit"): 1.3, ("aggregate", "plain"): 0.6, ("miner", "plain"): 0.5}

Tensors = dict[str, torch.Tensor]


def llama(vocabulary: int, width: int, inner: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama's parameters."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, width), "head": (vocabulary, width), "norm": (width,)}
    for layer in range(layers):
        shapes |= {f"{layer}.{part}": (width, width) for part in "qkvo"}
        shapes |= {f"{layer}.gate": (inner, width), f"{layer}.up": (inner, width), f"{layer}.down": (width, inner)}
        shapes |= {f"{layer}.norm1": (width,), f"{layer}.norm2": (width,)}
    return shapes


# --- baselines -------------------------------------------------------------------------------------------------------


class Plain:
    """The documented method in its simplest form."""

    def __init__(self, parameters: Tensors) -> None:
        self.parameters = parameters
        self.momentum = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self.grids = {name: ChunkGrid.of(parameter.shape, 64) for name, parameter in parameters.items()}

    def bases(self, grid: ChunkGrid) -> tuple[torch.Tensor, ...]:
        """Return the DCT bases of the two directions."""
        return tuple(basis(side, torch.float32, torch.device("cpu")) for side in (grid.chunk_rows, grid.chunk_cols))

    def compress(self, x: torch.Tensor, grid: ChunkGrid) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices (int16) and values of the largest coefficients, [chunks, k]."""
        blocks = x.view(-1, grid.chunk_rows, grid.cols // grid.chunk_cols, grid.chunk_cols)
        tall, wide = self.bases(grid)
        flat = torch.einsum("yhxw,fh,gw->yxfg", blocks, tall, wide).reshape(-1, grid.entries)
        indices = flat.abs().topk(min(K, grid.entries), dim=1, sorted=False).indices
        return indices.to(torch.int16), flat.gather(1, indices)

    def decompress(self, indices: torch.Tensor, values: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
        """Return the mean over all senders of a coefficient, transformed back."""
        dense = torch.zeros(grid.chunks, grid.entries)
        dense.scatter_reduce_(1, indices.long(), values, reduce="mean", include_self=False)
        blocks = dense.view(-1, grid.cols // grid.chunk_cols, grid.chunk_rows, grid.chunk_cols)
        tall, wide = self.bases(grid)
        return torch.einsum("yxfg,fh,gw->yhxw", blocks, tall, wide).reshape(grid.shape)

    def encode(self, tensors: Tensors) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Encode all tensors."""
        return {name: self.compress(tensors[name], grid) for name, grid in self.grids.items()}

    def miner(self, gradients: Tensors) -> None:
        """Encode a whole update, with error feedback."""
        for name, grid in self.grids.items():
            momentum = self.momentum[name]
            momentum.mul_(DECAY).add_(gradients[name], alpha=LR)
            momentum -= self.decompress(*self.compress(momentum, grid), grid)

    def aggregate(self, peers: list[dict[str, tuple[torch.Tensor, torch.Tensor]]]) -> None:
        """Apply a step along the sign of the mean."""
        for name, grid in self.grids.items():
            indices = torch.cat([peer[name][0] for peer in peers], dim=1)
            values = torch.cat([peer[name][1] / (peer[name][1].norm() + 1e-8) for peer in peers], dim=1)
            self.parameters[name].sub_(self.decompress(indices, values, grid).sign_(), alpha=LR)


def limit_encode(blocks: Mapping[str, torch.Tensor]) -> None:
    """Encode chunks that are already contiguous; the result is discarded."""
    for chunks in blocks.values():
        tall, wide = (basis(side, torch.float32, torch.device("cpu")) for side in chunks.shape[1:])
        flat = (tall @ chunks @ wide.T).view(len(chunks), -1)
        flat.abs_().topk(min(K, flat.shape[1]), dim=1, sorted=False)


# --- this project ----------------------------------------------------------------------------------------------------


class Ours:
    """The project's code, called as in nodes."""

    def __init__(self, parameters: Tensors) -> None:
        hparams = load_hparams(ROOT / "hparams-demo.json").model_copy(update={"topk_compression": K})
        self.parameters = parameters
        self.scheme = DemoOuter(parameters, hparams)
        self.spec = self.scheme.spec

    def encode(self, tensors: Tensors, uid: int = 0) -> bytes:
        """Encode coefficients as packed bytes, without momentum."""
        return build(self.largest(tensors), self.spec, uid=uid, **META)

    def largest(self, tensors: Tensors) -> dict[str, Coefficients]:
        """Return the coefficients to send of all tensors."""
        kept: dict[str, Coefficients] = {}
        for group in tensor_groups(self.spec, torch.device("cpu")):
            row_blocks = [largest_coefficients(tensors, group, bands) for bands, _ in group.grid.row_blocks()]
            kept |= by_tensor(row_blocks, group)
        return kept

    def parts(self, tensors: Tensors, bodies: list[bytes]) -> Iterator[tuple[str, str, Callable[[], object]]]:
        """Yield the steps of each stage that can run alone."""
        spec = self.spec
        coefficients = {
            name: (whole := p.grid.view(tensors[name]), transform(p.grid.cut(whole), p.grid))
            for name, p in spec.tensors.items()
        }
        kept = self.largest(tensors)
        updates = [parse(body, spec, window=1, uid=uid) for uid, body in enumerate(bodies)]
        together = list(tensor_groups(spec, torch.device("cpu")))
        decoded = [decode_all(updates, group.tensors) for group in together]

        def per_row_block(work: Callable[[str, slice, slice], object]) -> None:
            for name, tensor in spec.tensors.items():
                for bands, chunks in tensor.grid.row_blocks():
                    work(name, bands, chunks)

        def cut_and_transform(name: str, bands: slice, _: slice) -> None:
            grid = spec.tensors[name].grid
            transform(grid.cut(coefficients[name][0][bands]), grid)

        def rank(name: str, _: slice, chunks: slice) -> None:
            top_k(coefficients[name][1][chunks], spec.tensors[name].k)

        def invert(name: str, _: slice, chunks: slice) -> None:
            grid = spec.tensors[name].grid
            grid.join(inverse(coefficients[name][1][chunks], grid))

        def add_up() -> None:
            for group, (indices, values) in zip(together, decoded, strict=True):
                for _, chunks in group.grid.row_blocks():
                    scatter_sum(indices[:, chunks], values[:, chunks], group.grid)

        yield "encode", "cutting, DCT", lambda: per_row_block(cut_and_transform)
        yield "encode", "top-k", lambda: per_row_block(rank)
        yield "encode", "quantizing, packing", lambda: build(kept, spec, uid=0, **META)
        yield "aggregate", "decoding", lambda: [decode_all(updates, group.tensors) for group in together]
        yield "aggregate", "adding", add_up
        yield "aggregate", "inverse DCT", lambda: per_row_block(invert)


# --- measuring -------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of one call, which excludes other programs on a busy machine."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def extra_memory(work: Callable[[], object]) -> int:
    """Return a call's peak bytes above those held before it; not for the first call, which fills caches."""
    work()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # returns freed memory to the system, so that its reuse is measured
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory held now
    before = _peak()
    work()
    return _peak() - before


def _peak() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def measure(millions: int, repetitions: int) -> list[dict[str, Any]]:
    """Return the rows of the table for one size."""
    # While memory is measured, all but small blocks are released at once, so that holes in the heap do not count.
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 2**16)
    shapes = llama(*SIZES[millions])
    generator = torch.Generator().manual_seed(millions)
    gradients = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    count = sum(parameter.numel() for parameter in parameters.values()) / 1e6
    largest = max(parameter.nbytes for parameter in parameters.values())
    plain, ours = Plain(parameters), Ours(parameters)
    blocks = {
        name: grid.cut(grid.view(gradients[name])).view(-1, grid.chunk_rows, grid.chunk_cols)
        for name, grid in plain.grids.items()
    }
    # Peers' gradients are the same numbers at other positions: cheaper than new ones, and equivalent here.
    rolled = [{name: g.view(-1).roll(4097 * uid).view(g.shape) for name, g in gradients.items()} for uid in range(2)]
    bodies = [ours.encode(rolled[uid % 2], uid) for uid in range(PEERS)]
    updates = [parse(body, ours.spec, window=1, uid=uid) for uid, body in enumerate(bodies)]
    peers = [plain.encode(rolled[uid % 2]) for uid in range(PEERS)]
    del rolled
    ours.scheme.pack(gradients, step=0, uid=0, **META)  # makes the momentum

    contestants: dict[tuple[str, str], Callable[[], object]] = {
        ("encode", "plain"): lambda: plain.encode(gradients),
        ("encode", "limit"): lambda: limit_encode(blocks),
        ("encode", "ours"): lambda: ours.encode(gradients),
        ("aggregate", "plain"): lambda: plain.aggregate(peers),
        ("aggregate", "ours"): lambda: ours.scheme.apply(updates, step=0),
        ("miner", "plain"): lambda: plain.miner(gradients),
        ("miner", "ours"): lambda: ours.scheme.pack(gradients, step=0, uid=0, **META),
    }
    memory = {key: extra_memory(work) / largest for key, work in contestants.items()}
    # From here on the allocator keeps freed blocks, so that no time includes requesting pages from the system.
    libc.mallopt(M_MMAP_THRESHOLD, 2**25)
    libc.mallopt(M_TRIM_THRESHOLD, 2**28)
    rows: list[dict[str, Any]] = []
    for repetition in range(repetitions):
        for (stage, who), work in contestants.items():
            row = {"millions": millions, "stage": stage, "who": who, "part": "all", "repetition": repetition}
            rows.append(row | {"ms per million": seconds(work) * 1e3 / count, "memory": memory[stage, who]})
    for stage, part, work in ours.parts(gradients, bodies):
        row = {"millions": millions, "stage": stage, "who": "ours", "part": part, "repetition": 0}
        rows.append(row | {"ms per million": statistics.median(seconds(work) for _ in range(3)) * 1e3 / count})
    return rows


def column(rows: list[dict[str, Any]], millions: int, stage: str, who: str) -> list[float]:
    """Return the times of one implementation, by repetition."""
    wanted = {"millions": millions, "stage": stage, "who": who, "part": "all"}
    return [row["ms per million"] for row in rows if wanted.items() <= row.items()]


def report(rows: list[dict[str, Any]], sizes: list[int]) -> None:
    """Print the table."""
    print(f"{'size':>5} {'stage':10} {'who':22} {'ms/million':>10} {'quartiles':>15} {'memory':>7}   ratio")
    for millions in sizes:
        for stage in ("encode", "aggregate", "miner"):
            for who in ("plain", "limit", "ours"):
                if not (found := column(rows, millions, stage, who)):
                    continue
                low, middle, high = statistics.quantiles(found, n=4)
                row = next(r for r in rows if (r["millions"], r["stage"], r["who"]) == (millions, stage, who))
                text = f"{millions:4}M {stage:10} {who:22} {middle:10.2f} {low:7.2f}-{high:<7.2f} {row['memory']:7.2f}"
                for (aim, base), most in TARGETS.items():
                    if aim == stage and who == "ours":
                        ratios = [o / b for o, b in zip(found, column(rows, millions, stage, base), strict=True)]
                        text += f"   {statistics.median(ratios):.2f} x {base}, at most {most} wanted"
                print(text)
            for row in rows:
                if (row["millions"], row["stage"]) == (millions, stage) and row["part"] != "all":
                    print(f"{'':16} of it {row['part']:16} {row['ms per million']:10.2f}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), choices=SIZES, help="in millions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for millions in arguments.sizes for row in measure(millions, arguments.repetitions)]
    report(rows, arguments.sizes)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "compress.csv").open("w", newline="") as file:
        fields = ["millions", "stage", "who", "part", "repetition", "ms per million", "memory"]
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.4f}" if isinstance(value, float) else value for key, value in row.items()})
    redraw("compress")


if __name__ == "__main__":
    main()

"""Inner products of updates, from their sparse coordinates in sampled chunks.

A large model's updates are compared in some of their chunks, which nobody knows beforehand. Sums over a tensor's sample
are scaled to the whole tensor, so they are unbiased estimates; a small model's sample is all of it.

Sums are float64, in an order that follows from the layout alone: a process repeats the same bits, other processors may
differ in the last ones.
"""

import math

import numpy as np
import torch

from tplr.compress.layout import PayloadSpec
from tplr.pcg64 import PCG64Stream
from tplr.seeds import derive

# Chunks of a model that are compared: a model below 67 million parameters is compared whole.
SAMPLED_CHUNKS = 2**14
# Pairs of updates, each in one chunk: with more than 128 updates fewer chunks are compared.
PAIRS = 2**28
# Of each tensor at least so many chunks: small tensors count too.
LEAST_CHUNKS = 8
# Entries that one peer's coordinates are spread out in at a time.
ENTRIES_IN_CACHE = 2**15
# Coordinates of all peers together that are decoded at a time: bounds the memory.
COORDINATES_AT_ONCE = 2**20


def sample_size(peers: int) -> int:
    """How many chunks of a model are compared."""
    return min(SAMPLED_CHUNKS, PAIRS // max(1, peers) ** 2)


def sample_chunks(spec: PayloadSpec, seed: int, limit: int) -> dict[str, np.ndarray]:
    """Ascending numbers of the sampled chunks of each tensor, int64; together about ``limit``, or all.

    Args:
        seed: each set of so many chunks of a tensor is equally likely.
    """
    total = sum(tensor.grid.chunks for tensor in spec.tensors.values())
    sample = {}
    for name, tensor in spec.tensors.items():
        chunks = tensor.grid.chunks
        count = min(chunks, max(LEAST_CHUNKS, math.ceil(chunks * limit / total)))
        stream, picked = PCG64Stream(derive("aligned-chunks", seed, name)), set(range(chunks if count == chunks else 0))
        while len(picked) < count:
            picked.add(stream.integers(0, chunks))
        sample[name] = np.array(sorted(picked), dtype=np.int64)
    return sample


def blocks(chunks: np.ndarray, peers: int, k: int) -> list[np.ndarray]:
    """The sampled chunks of a tensor, a bounded number of coordinates at a time."""
    size = max(1, COORDINATES_AT_ONCE // (peers * k))
    return [chunks[start : start + size] for start in range(0, len(chunks), size)]


def dense_products(indices: torch.Tensor, values: torch.Tensor, dense: torch.Tensor) -> np.ndarray:
    """Inner product of each peer with one dense tensor.

    Args:
        indices, values: [peers, chunks, k] each.
        dense: the same chunks with all their entries, [chunks, entries].

    Returns:
        float64 [peers].
    """
    found = dense.expand(len(indices), *dense.shape).gather(2, indices)
    return (found.double() * values.double()).sum(dim=(1, 2)).cpu().numpy()


def gram_matrix(indices: torch.Tensor, values: torch.Tensor, entries: int) -> np.ndarray:
    """Inner products of all pairs of peers, float64 [peers, peers].

    One peer's entries are spread out, and those at the coordinates of all others are picked: the cost of a pair is that
    of its coordinates, not of all entries.

    Args:
        indices, values: [peers, chunks, k] each, on the CPU.
        entries: of a chunk.
    """
    peers, chunks, _ = indices.shape
    gram = np.zeros((peers, peers))
    step = max(1, ENTRIES_IN_CACHE // entries)
    for start in range(0, chunks, step):
        some = slice(start, start + step)
        places = indices[:, some].numpy()
        places = (places + entries * np.arange(places.shape[1])[:, None]).reshape(peers, -1)
        numbers = values[:, some].double().flatten(1).numpy()
        dense, found = np.zeros(step * entries), np.empty_like(numbers)
        for peer in range(peers):
            dense[places[peer]] = numbers[peer]
            picked = np.take(dense, places[peer:], out=found[peer:], mode="clip")  # other modes copy
            gram[peer, peer:] += np.einsum("ij,ij->i", picked, numbers[peer:])
            dense[places[peer]] = 0.0
    return np.triu(gram) + np.triu(gram, 1).T

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
# A coordinate that more peers sent is popular.
POPULAR = 32
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

    Coordinates are sorted, so those that several peers sent are neighbours: only these pairs cost something. Where more
    than ``POPULAR`` peers sent the same one, a dense product is faster than pairs.

    Args:
        indices, values: [peers, chunks, k] each, on the CPU; a peer sends a coordinate at most once.
        entries: of a chunk.
    """
    peers, chunks, k = indices.shape
    places = indices.numpy().astype(np.uint16 if entries <= 2**16 else np.int64)
    places = places.swapaxes(0, 1).reshape(chunks, peers * k)
    numbers = values.numpy().swapaxes(0, 1).reshape(chunks, peers * k)
    order = places.argsort(axis=1, kind="stable")  # of 16 bits: a radix sort
    places, numbers = (np.take_along_axis(one, order, axis=1) for one in (places, numbers))
    places = places.astype(np.int64) + entries * np.arange(chunks)[:, None]
    place, who, number = places.ravel(), (order // k).ravel(), numbers.ravel().astype(np.float64)
    first = np.flatnonzero(np.diff(place, prepend=-1))
    senders = np.diff(first, append=len(place))
    popular = np.repeat(senders > POPULAR, senders)
    dense = np.zeros((peers, np.count_nonzero(senders > POPULAR)))
    columns = np.cumsum(senders > POPULAR) - 1
    dense[who[popular], np.repeat(columns, senders)[popular]] = number[popular]
    gram = dense @ dense.T
    upper = _pairs(place[~popular], who[~popular], number[~popular], peers)
    return gram + upper + upper.T + np.diag(np.bincount(who[~popular], number[~popular] ** 2, minlength=peers))


def _pairs(place: np.ndarray, who: np.ndarray, number: np.ndarray, peers: int) -> np.ndarray:
    """Inner products of the pairs of different peers, of which the first is the smaller one: the upper triangle.

    Args:
        place: sorted coordinates; those of one place are in the order of peers.
    """
    total = np.zeros(peers * peers)
    left, distance = np.flatnonzero(place[1:] == place[:-1]), 1
    while len(left):
        right = left + distance
        total += np.bincount(who[left] * peers + who[right], number[left] * number[right], minlength=peers * peers)
        distance += 1
        left = left[left < len(place) - distance]
        left = left[place[left] == place[left + distance]]
    return total.reshape(peers, peers)

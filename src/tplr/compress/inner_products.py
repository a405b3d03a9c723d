"""Computes inner products of updates from their sparse coordinates in sampled chunks.

A large model's updates are compared in some of their chunks, which nobody knows in advance. Sums over a tensor's sample
are scaled to the whole tensor, so they are unbiased estimates; the sample of a small model is the whole model.

Sums are float64, in an order that follows from the layout alone: a process reproduces the same bits; on other
processors the last bits may differ.
"""

import math

import numpy as np
import torch

from tplr.compress.layout import PayloadSpec
from tplr.pcg64 import PCG64Stream
from tplr.seeds import derive

# Number of a model's chunks that are compared; a model below 67 million parameters is compared whole.
SAMPLED_CHUNKS = 2**14
# Maximum number of pairs of updates times chunks: with more than 128 updates fewer chunks are compared.
PAIRS = 2**28
# Minimum number of chunks of each tensor, so that small tensors count, too.
LEAST_CHUNKS = 8
# A coordinate sent by more peers than this is popular.
POPULAR = 32
# From this share of a chunk's entries on, a dense product is faster than the search for shared coordinates.
DENSE = 1 / 16
# Number of coordinates, over all peers, that are decoded at a time; bounds the memory.
COORDINATES_AT_ONCE = 2**20


def sample_size(peers: int) -> int:
    """Return the number of a model's chunks that are compared."""
    return min(SAMPLED_CHUNKS, PAIRS // max(1, peers) ** 2)


def sample_chunks(spec: PayloadSpec, seed: int, limit: int) -> dict[str, np.ndarray]:
    """Return the ascending numbers of each tensor's sampled chunks, int64; about ``limit`` in total, or all.

    Args:
        seed: seed of the sample; all sets of the same number of a tensor's chunks are equally likely.
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
    """Split a tensor's sampled chunks into blocks with a bounded number of coordinates."""
    size = max(1, COORDINATES_AT_ONCE // (peers * k))
    return [chunks[start : start + size] for start in range(0, len(chunks), size)]


def dense_products(indices: torch.Tensor, values: torch.Tensor, dense: torch.Tensor) -> np.ndarray:
    """Return the inner product of each peer with one dense tensor.

    Args:
        indices, values: [peers, chunks, k] each.
        dense: the same chunks with all their entries, [chunks, entries].

    Returns:
        float64 [peers].
    """
    found = dense.expand(len(indices), *dense.shape).gather(2, indices)
    return (found.double() * values.double()).sum(dim=(1, 2)).cpu().numpy()


def gram_matrix(indices: torch.Tensor, values: torch.Tensor, entries: int) -> np.ndarray:
    """Return the inner products of all pairs of peers, float64 [peers, peers].

    If few entries are sent, coordinates are sorted, so that equal coordinates of several peers are neighbours, and only
    these pairs cost time. A coordinate that more than ``POPULAR`` peers sent is in a dense product, which is faster
    than its pairs; from ``DENSE`` on all coordinates are.

    Args:
        indices, values: [peers, chunks, k] each, on the CPU; a peer sends a coordinate at most once.
        entries: number of entries of a chunk.
    """
    if indices.shape[2] >= DENSE * entries:
        return _dense_gram(indices, values, entries)
    peers, chunks, k = indices.shape
    places = indices.numpy().astype(np.uint16 if entries <= 2**16 else np.int64)
    places = places.swapaxes(0, 1).reshape(chunks, peers * k)
    numbers = values.numpy().swapaxes(0, 1).reshape(chunks, peers * k)
    order = places.argsort(axis=1, kind="stable")  # a radix sort, as places have 16 bits
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


def _dense_gram(indices: torch.Tensor, values: torch.Tensor, entries: int) -> np.ndarray:
    peers, chunks, _ = indices.shape
    gram = torch.zeros(peers, peers, dtype=torch.float64)
    for some in blocks(np.arange(chunks), peers, entries):
        part = slice(some[0], some[-1] + 1)
        dense = torch.zeros(peers, len(some), entries, dtype=torch.float64)
        dense = dense.scatter_(2, indices[:, part], values[:, part].double()).flatten(1)
        gram += dense @ dense.T
    return gram.numpy()


def _pairs(place: np.ndarray, who: np.ndarray, number: np.ndarray, peers: int) -> np.ndarray:
    """Return the inner products of pairs of different peers, the smaller number first: the upper triangle.

    Args:
        place: sorted coordinates; equal coordinates are in peer order.
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

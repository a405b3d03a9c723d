"""Inner products of a validator's gradient with the updates' steps as applied, which predict their gain.

One forward and backward pass over sampled batches gives the gradient g. An update's step d, as the outer scheme applies
it (``OuterScheme.step_factors``), changes the loss by ``-<g, d>`` times the learning rate, to first order. The inner
products are computed in the basis of the update's sparse coordinates, so no update is decoded into a whole tensor.

First order: Pruthi et al., "Estimating Training Data Influence by Tracing Gradient Descent", arXiv 2002.08484.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tplr.compress.chunks import ChunkGrid
from tplr.compress.inner_products import blocks, dense_products, gram_matrix, sample_chunks, sample_size
from tplr.compress.layout import TensorSpec
from tplr.compress.payload import Update, decode_chunks
from tplr.errors import TrainingError
from tplr.training.device import DEFAULTS, DeviceSettings
from tplr.training.evaluation import Baseline
from tplr.training.gradient import take_gradients
from tplr.training.local import Stop, never
from tplr.training.loss import Precision, batch_losses
from tplr.training.outer.base import OuterScheme
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext
from tplr.training.rank_batches import all_losses, check_finite, own_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY = 1e-30


class Alignment(NamedTuple):
    """Directions of a window's updates relative to a gradient and to each other.

    Attributes:
        uids: ascending.
        products: ``<g, d> / (|g| * scale)`` of each update. ``scale`` is the length of the longest step that any update
            could make in this window: of one that has the norm cap in every tensor (``OuterScheme.step_factors``
            included). Most honest steps are nearly as long, so a product is about the cosine. If the scale were that of
            the window's own updates, a majority of short ones would make the window count like many.
        norms: L2 norm of all values of each update, as sent.
        gram: ``<d_i, d_j> / scale**2``: the upper triangle with the diagonal, row by row.
        unit: learning rate times ``|g|`` times the root of the sum of squared norm caps. A product times it is, to
            first order, the loss in nats that the step gains if it is taken alone (``OuterScheme.trial_step``). With
            DeMo, which takes signs, it is only proportional to that loss.
        largest_norm: of an honest update at this step; see ``OuterScheme.largest_norm``.
    """

    uids: tuple[int, ...]
    products: tuple[float, ...]
    norms: tuple[float, ...]
    gram: tuple[float, ...]
    unit: float = 1.0
    largest_norm: float = math.inf

    def products_in(self, unit: float) -> tuple[float, ...]:
        """Return the products in units of another gradient's ``unit``."""
        return tuple(one * self.unit / unit for one in self.products)


class Gradient(NamedTuple):
    """The mean gradient over batches, by parameter name (over several ranks, shards), and the losses of its batches."""

    tensors: dict[str, torch.Tensor]
    baseline: Baseline


def probe_gradient(
    model: PreTrainedModel,
    batches: np.ndarray,
    precision: Precision,
    *,
    parallel: ParallelContext = SINGLE_PROCESS,
    settings: DeviceSettings = DEFAULTS,
    stop: Stop = never,
) -> Gradient:
    """Compute the gradient with one forward and backward pass over batches; ranks take batches alternately.

    Args:
        batches: (batches, B, T) token ids.
        stop: as in ``own_batches``.

    Raises:
        TrainingError: a loss is not finite, or ended by ``stop``.
        ValueError: no batches.
    """
    model.zero_grad(set_to_none=True)
    found = []
    for batch, counts in own_batches(batches, parallel, stop):
        mean, losses = batch_losses(model, batch, precision, settings)
        # FSDP averages gradients over ranks; the factor makes them a sum.
        (mean * (parallel.size if counts else 0) / len(batches)).backward()
        found.append(losses.double().mean(dim=1))
    tensors = take_gradients(model)
    losses = all_losses(found, batches, parallel)
    check_finite(losses)
    return Gradient(tensors, Baseline(batches, losses))


@torch.no_grad()
def align(
    outer: OuterScheme,
    gradient: Mapping[str, torch.Tensor],
    updates: Sequence[Update],
    *,
    step: int,
    seed: int,
    parallel: ParallelContext = SINGLE_PROCESS,
    pairs: bool = True,
    together: int = 0,
    stop: Stop = never,
) -> Alignment:
    """Compute inner products of updates with a gradient and, if ``pairs``, with each other; else only the diagonal.

    Args:
        gradient: by parameter name; over several ranks, shards.
        updates: of one window.
        seed: selects the sampled chunks of a large model; unknown to the senders.
        together: number of updates that were aligned together, if some of them are missing now: in a large model it
            determines the number of sampled chunks.
        stop: called before each group of tensors; if True on any rank, all ranks end.

    Raises:
        TrainingError: the gradient is not finite, or ended by ``stop``.
    """
    updates = sorted(updates, key=lambda update: update.uid)
    sample = sample_chunks(outer.spec, seed, sample_size(together or len(updates)))
    sums = _Sums.zeros(len(updates))
    for tensor, whole in outer.whole(gradient, stop):
        chunks = sample[tensor.name]
        # A CPU's float32 sum of squares is a fifth too small for half a billion entries.
        sums.gradient += float(torch.linalg.vector_norm(whole, dtype=torch.float64)) ** 2
        cap = outer.norm_cap(tensor.name, step=step)
        (factor,) = outer.step_factors(tensor.name, [cap], step=step)
        sums.longest += (factor * cap) ** 2
        sums.caps += cap**2
        if not updates:
            continue
        lengths = [update.norm(tensor.name) for update in updates]
        sums.norms += np.square(lengths)
        factors = np.array(outer.step_factors(tensor.name, lengths, step=step))
        products, gram = _of_tensor(outer, tensor, whole, updates, chunks, pairs=pairs)
        part = tensor.grid.chunks / len(chunks)
        sums.products += part * factors * products
        sums.gram += part * factors[:, None] * factors * gram
    sums = sums.over_ranks(parallel)
    found = _normalised([update.uid for update in updates], sums, outer.rate(step))
    return found._replace(largest_norm=outer.largest_norm(step, gradient=_length(sums.gradient)))


class _Sums:
    """Running sums over tensors, all float64.

    Attributes:
        gradient: squared norm of the gradient.
        longest: squared length of the longest step.
        caps: squared norm caps.
        norms: squared norms of the updates as sent.
        products, gram: inner products of the steps.
    """

    def __init__(self, flat: np.ndarray, count: int) -> None:
        self.gradient, self.longest, self.caps = flat[:3].tolist()
        self.norms, self.products, rest = np.split(flat[3:], [count, 2 * count])
        self.gram = rest.reshape(count, count)

    @classmethod
    def zeros(cls, count: int) -> _Sums:
        return cls(np.zeros(3 + 2 * count + count * count), count)

    def over_ranks(self, parallel: ParallelContext) -> _Sums:
        """Return the sums over all ranks, added in rank order."""
        mine = np.concatenate([[self.gradient, self.longest, self.caps], self.norms, self.products, self.gram.ravel()])
        every = [np.frombuffer(one) for one in parallel.gather_bytes(mine.tobytes())]
        return _Sums(sum(every[1:], every[0]), len(self.norms))


def _of_tensor(
    outer: OuterScheme,
    tensor: TensorSpec,
    gradient: torch.Tensor,
    updates: Sequence[Update],
    chunks: np.ndarray,
    *,
    pairs: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the updates' products with the gradient (float64 [updates]) and each other, in chunks of one tensor."""
    products, gram = np.zeros(len(updates)), np.zeros((len(updates), len(updates)))
    for some in blocks(chunks, len(updates), tensor.k):
        indices, values = decode_chunks(updates, tensor, some)
        dense = outer.in_basis(_cut(gradient, tensor.grid, some), tensor.grid)
        products += dense_products(indices.to(dense.device), values.to(dense.device), dense)
        if pairs:
            gram += gram_matrix(indices, values, tensor.grid.entries)
        else:
            gram += np.diag(values.double().square().sum(dim=(1, 2)).numpy())
    return products, gram


def _cut(tensor: torch.Tensor, grid: ChunkGrid, chunks: np.ndarray) -> torch.Tensor:
    """Return some chunks of a tensor: [chunks, entries]."""
    across = grid.cols // grid.chunk_cols
    blocks = grid.blocks(grid.view(tensor))
    numbers = torch.from_numpy(chunks).to(tensor.device)
    return blocks[numbers // across, numbers % across].flatten(1)


def _normalised(uids: Sequence[int], sums: _Sums, rate: float) -> Alignment:
    if not math.isfinite(sums.gradient):
        raise TrainingError("the gradient is not finite: no update can be measured against it")
    scale, length = _length(sums.longest), _length(sums.gradient)
    upper = np.triu_indices(len(uids))
    return Alignment(
        uids=tuple(uids),
        products=tuple((sums.products / (length * scale)).tolist()),
        norms=tuple(np.sqrt(sums.norms).tolist()),
        gram=tuple((sums.gram[upper] / scale**2).tolist()),
        unit=rate * length * _length(sums.caps),
    )


def _length(squares: float) -> float:
    """Return the length of a vector with this sum of squares, and more than 0."""
    return max(math.sqrt(squares), TINY)

"""SparseLoCo: miners send the largest entries of their inner steps' change; the model steps along their sum, clipped.

"Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706. As there, a coordinate is divided by the
number of peers, not by the number of its senders: sending indices that nobody else sends gives no advantage. Here short
updates count as less than one each (``norm_caps.py``).

All nodes must compute the same bits. All operations here are elementwise except ``compress/aggregate.py``, whose sums
do not depend on the order in which a machine adds in parallel.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tplr.compress.aggregate import clip, norms, weighted_sums
from tplr.compress.chunks import ChunkGrid
from tplr.compress.layout import TensorSpec
from tplr.compress.payload import Coefficients, Update, decode_all
from tplr.compress.tensor_groups import TensorGroup
from tplr.compress.topk import select
from tplr.hparams import HParams
from tplr.training.outer.base import OuterScheme
from tplr.training.outer.norm_caps import (
    HISTORY,
    effective_count,
    first_cap,
    largest_norm,
    last_caps,
    no_history,
    norm_bound,
    recorded,
    window_cap,
)
from tplr.training.schedule import outer_learning_rate


class Clipping(NamedTuple):
    """Of one tensor in a window: its norm cap, and the step's length over that of the mean of the clipped updates."""

    cap: float
    lengthening: float


class SparselocoOuter(OuterScheme):
    """See ``OuterScheme``. A miner's tensors are the weights before the inner steps minus those after them."""

    name = "sparseloco"
    state_version = 3

    def _configure(self, hparams: HParams) -> None:
        assert hparams.sparseloco is not None
        self._constants = hparams.sparseloco
        self._cap_history = {name: no_history() for name in self._owned}
        self._clipping: dict[str, Clipping] = {}  # of the window to be applied next, by name; see ``set_caps``
        if self._constants.outer_momentum:
            self._momentum = {name: torch.zeros(one.shape, device=self._device) for name, one in self._owned.items()}

    def in_basis(self, chunks: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
        """See ``OuterScheme``: the entries themselves."""
        return chunks

    def _accumulate(
        self,
        group: TensorGroup,
        errors: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: int,
    ) -> dict[str, Coefficients]:
        """Compute ``e = decay * e + difference``; return the largest entries of ``e``."""
        for name, tensor in tensors.items():
            errors[name].mul_(self._constants.error_feedback_decay).add_(tensor)
        return {tensor.name: _largest(errors[tensor.name], tensor) for tensor in group.tensors}

    def _add_decoded(
        self, group: TensorGroup, errors: Mapping[str, torch.Tensor], update: Update, *, sign: int
    ) -> None:
        for tensor in group.tensors:
            whole = tensor.grid.view(errors[tensor.name])
            sent = decode_all([update], [tensor], self._device)
            for bands, total in weighted_sums(sent, [sign], tensor.grid):
                whole[bands] += tensor.grid.join(total.float())

    def apply(self, updates: Sequence[Update], *, step: int) -> None:
        """See ``OuterScheme``."""
        super().apply(updates, step=step)
        self._clipping = {}

    @torch.no_grad()
    def set_caps(self, updates: Sequence[Update], *, step: int) -> None:
        """See ``OuterScheme``."""
        super().set_caps(updates, step=step)
        self._clipping = {}
        for name in self._owned if updates else ():
            _, values = decode_all(updates, [self.spec.tensors[name]], self._device)
            lengths = norms(values).tolist()
            _, cap = self._cap(name, lengths, step)
            self._clipping[name] = Clipping(cap, len(lengths) / _count(lengths, cap))

    def step_factors(self, name: str, lengths: Sequence[float], *, step: int) -> list[float]:
        """See ``OuterScheme``: the factors of the step with the caps of ``set_caps``, times the number of updates."""
        cap, lengthening = self._clipping_of(name, step)
        return [lengthening * factor for factor in clip(lengths, cap)]

    def norm_cap(self, name: str, *, step: int) -> float:
        """See ``OuterScheme``: the cap of ``set_caps``."""
        return self._clipping_of(name, step).cap

    def rate(self, step: int) -> float:
        """See ``OuterScheme``."""
        return outer_learning_rate(step, self._constants)

    def _clipping_of(self, name: str, step: int) -> Clipping:
        return self._clipping.get(name) or Clipping(self._cap(name, (), step)[1], 1.0)

    @torch.no_grad()
    def expected_step(self, sign: int, own: Update | None, *, step: int) -> None:
        """See ``OuterScheme``. Compute ``p -= lr * expected_share * (clipped(decode(own)) + e)``."""
        share = sign * self._constants.expected_share
        if not share:
            return
        if own:
            self.trial_step(own, step=step, share=share)
        if self._error_feedback.empty:
            return
        lr = self.rate(step) * share
        for group, parameters in self._owners.whole(self._parameters, write_back=True):
            errors = self._error_feedback.copies([one.name for one in group.tensors])
            for name, error in errors.items():
                parameters[name].sub_(error, alpha=lr)

    def largest_norm(self, step: int, *, gradient: float) -> float:
        """See ``OuterScheme``: inner steps have the same length whatever their gradients are."""
        return math.hypot(*(largest_norm(one, self._constants, step) for one in self.spec.tensors.values()))

    def _apply(
        self,
        group: TensorGroup,
        parameters: Mapping[str, torch.Tensor],
        updates: Sequence[Update],
        step: int,
        share: float,
    ) -> None:
        """Compute ``m = momentum * m + d; p -= lr * m``; with Nesterov ``p -= lr * (d + momentum * m)``.

        ``d`` is that of ``_direction``: an update with a norm above the window's cap is scaled down to the cap. ``lr``
        is the learning rate times ``share``.
        """
        c, rate, whole = self._constants, self.rate(step) * share, share == 1
        for tensor in group.tensors:
            parameter = tensor.grid.view(parameters[tensor.name])
            for bands, new in self._direction(updates, tensor, step, record=whole):
                direction = new
                if c.outer_momentum:
                    kept = tensor.grid.view(self._momentum[tensor.name])[bands]
                    momentum = kept.double().mul_(c.outer_momentum).add_(new).float()
                    if whole:
                        kept.copy_(momentum)
                    direction = momentum.double()
                    if c.outer_nesterov:
                        direction = new + direction.mul_(c.outer_momentum)
                part = parameter[bands]
                part.copy_(torch.sub(part, direction.mul_(rate), out=direction))

    def _trial_step(
        self, group: TensorGroup, parameters: Mapping[str, torch.Tensor], update: Update, step: int, share: float
    ) -> None:
        """Compute ``p -= lr * share * clipped(decode(update))``."""
        for tensor in group.tensors:
            grid, parameter = tensor.grid, tensor.grid.view(parameters[tensor.name])
            indices, values = decode_all([update], [tensor], self._device)
            (factor,) = clip(norms(values).tolist(), self._clipping_of(tensor.name, step).cap)
            lr = self.rate(step) * share * factor
            for bands, chunks in grid.row_blocks(self._device):
                zeros = values.new_zeros(chunks.stop - chunks.start, grid.entries)
                parameter[bands].sub_(grid.join(zeros.scatter_(1, indices[0, chunks], lr * values[0, chunks])))

    def _direction(
        self, updates: Sequence[Update], tensor: TensorSpec, step: int, *, record: bool
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the sum of one tensor's clipped updates, divided by ``effective_count``, by row block.

        Args:
            record: whether the window's cap becomes part of the history.

        Yields:
            bands of the grid, and float64 [bands, chunk rows, cols].
        """
        peers = decode_all(updates, [tensor], self._device)
        lengths = norms(peers[1]).tolist()
        relative, cap = self._cap(tensor.name, lengths, step)
        if record and any(lengths):
            self._cap_history[tensor.name] = recorded(self._cap_history[tensor.name], relative)
        count = _count(lengths, cap)
        weights = [factor / count for factor in clip(lengths, cap)]
        for bands, total in weighted_sums(peers, weights, tensor.grid):
            yield bands, tensor.grid.join(total)

    def _cap(self, name: str, lengths: Sequence[float], step: int) -> tuple[float, float]:
        """Return one tensor's cap in a window of updates with these norms: in units of its bound, and as a norm."""
        bound = norm_bound(self.spec.tensors[name], self._constants, step)
        history = last_caps(self._cap_history[name], first_cap(self.rate(step)))
        cap = window_cap([one / bound for one in lengths], history, first=step < HISTORY)
        return cap, cap * bound


def _count(lengths: Sequence[float], cap: float) -> float:
    return effective_count([min(length, cap) for length in lengths])


def _largest(errors: torch.Tensor, tensor: TensorSpec) -> Coefficients:
    """Return the k largest entries of each chunk, which are sent: [chunks, k] each."""
    whole, blocks = tensor.grid.view(errors), tensor.grid.row_blocks(errors.device)
    picked = [select(tensor.grid.cut(whole[bands]), tensor.k, grouped=tensor.grouped) for bands, _ in blocks]
    indices, values = zip(*picked, strict=True)
    return torch.cat(indices), torch.cat(values)

"""SparseLoCo: the largest entries of the change by inner steps are sent, and the model steps along their clipped mean.

"Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706. As there, a coordinate is divided by the
number of peers, not by the number of its senders: sending indices that nobody else sends gives no advantage.

All nodes must compute the same bits. Everything here is elementwise but for ``compress/aggregate.py``, whose sums do
not depend on how a machine adds in parallel.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from tplr.compress.aggregate import clip_to_median, norms, weighted_sums
from tplr.compress.layout import TensorSpec
from tplr.compress.payload import Coefficients, Update, decode_all
from tplr.compress.tensor_groups import TensorGroup
from tplr.compress.topk import top_k
from tplr.hparams import HParams
from tplr.training.device import DEFAULTS, DeviceSettings
from tplr.training.outer.base import OuterScheme
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext


class SparselocoOuter(OuterScheme):
    """See ``OuterScheme``. A miner's tensors are the weights before the inner steps minus those after them."""

    name = "sparseloco"
    state_version = 2

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        hparams: HParams,
        settings: DeviceSettings = DEFAULTS,
        parallel: ParallelContext = SINGLE_PROCESS,
    ) -> None:
        super().__init__(parameters, hparams, settings, parallel)
        assert hparams.sparseloco is not None
        self._constants = hparams.sparseloco
        if self._constants.outer_momentum:
            self._momentum = {name: torch.zeros(one.shape, device=self._device) for name, one in self._owned.items()}

    def _accumulate(
        self,
        group: TensorGroup,
        errors: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: int,
    ) -> dict[str, Coefficients]:
        """``e = decay * e + difference``; the largest entries of ``e`` are sent."""
        for name, tensor in tensors.items():
            errors[name].mul_(self._constants.error_feedback_decay).add_(tensor)
        return {tensor.name: _largest(errors[tensor.name], tensor) for tensor in group.tensors}

    def _add_decoded(
        self, group: TensorGroup, errors: Mapping[str, torch.Tensor], update: Update, *, sign: int
    ) -> None:
        for tensor in group.tensors:
            matrix = tensor.grid.matrix(errors[tensor.name])
            sent = decode_all([update], [tensor], self._device)
            for rows, total in weighted_sums(sent, [sign], tensor.grid):
                matrix[rows] += tensor.grid.join(total.float())

    def _apply(
        self, group: TensorGroup, parameters: Mapping[str, torch.Tensor], updates: Sequence[Update], step: int
    ) -> None:
        """``m = momentum * m + mean; p -= lr * m``; with Nesterov ``p -= lr * (mean + momentum * m)``.

        For each parameter, a peer whose update is longer than the (lower) median is scaled down to it.
        """
        c = self._constants
        for tensor in group.tensors:
            parameter = tensor.grid.matrix(parameters[tensor.name])
            for rows, mean in self._clipped_mean(updates, tensor):
                direction = mean
                if c.outer_momentum:
                    momentum = tensor.grid.matrix(self._momentum[tensor.name])[rows]
                    momentum.copy_(momentum.double().mul_(c.outer_momentum).add_(mean))
                    direction = momentum.double()
                    if c.outer_nesterov:
                        direction = mean + direction.mul_(c.outer_momentum)
                part = parameter[rows]
                part.copy_(torch.sub(part, direction.mul_(c.outer_learning_rate), out=direction))

    def _trial_step(
        self, group: TensorGroup, parameters: Mapping[str, torch.Tensor], update: Update, step: int
    ) -> None:
        """``p -= lr * eval_lr_factor * decode(update)``."""
        lr = self._constants.outer_learning_rate * self._eval_lr_factor
        for tensor in group.tensors:
            grid, parameter = tensor.grid, tensor.grid.matrix(parameters[tensor.name])
            indices, values = update.coefficients(tensor.name, self._device)
            for rows, chunks in grid.row_blocks(self._device):
                zeros = values.new_zeros(chunks.stop - chunks.start, grid.entries)
                parameter[rows].sub_(grid.join(zeros.scatter_(1, indices[chunks], lr * values[chunks])))

    def _clipped_mean(self, updates: Sequence[Update], tensor: TensorSpec) -> Iterator[tuple[slice, torch.Tensor]]:
        """The clipped mean of one tensor's updates, by row block: rows of the matrix, float64 [rows, cols]."""
        peers = decode_all(updates, [tensor], self._device)
        factors = clip_to_median(norms(peers[1]).tolist())
        for rows, total in weighted_sums(peers, [factor / len(factors) for factor in factors], tensor.grid):
            yield rows, tensor.grid.join(total)


def _largest(errors: torch.Tensor, tensor: TensorSpec) -> Coefficients:
    """The k largest entries of each chunk: [chunks, k] each."""
    matrix = tensor.grid.matrix(errors)
    picked = [top_k(tensor.grid.cut(matrix[rows]), tensor.k) for rows, _ in tensor.grid.row_blocks(errors.device)]
    indices, values = zip(*picked, strict=True)
    return torch.cat(indices), torch.cat(values)

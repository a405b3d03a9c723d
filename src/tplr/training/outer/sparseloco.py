"""SparseLoCo: the largest entries of what AdamW's inner steps changed travel, and their clipped mean is stepped along.

"Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706. A coordinate is divided by the number of
peers, as there, and not of those who sent it: nobody gains by indices that no one else sends.

All nodes must compute the same bits: what is not elementwise here is in ``compress/aggregate.py``, where no machine's
way of adding up in parallel can show.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tplr.compress.aggregate import clip_to_median, norms, weighted_sums
from tplr.compress.chunks import ChunkGrid
from tplr.compress.layout import PayloadSpec, TensorSpec
from tplr.compress.payload import Coefficients, Update, build, decode_all, parse
from tplr.compress.topk import top_k
from tplr.errors import StateError
from tplr.hparams import HParams
from tplr.training.outer.base import RowBlocks
from tplr.training.outer.checks import check_parameters, check_work, in_order
from tplr.training.outer.error_feedback import ErrorFeedback
from tplr.training.saved import checked_copies

STATE_VERSION = 2
MOMENTUM = "shared.momentum."


class SparselocoOuter:
    """See ``OuterScheme``.

    Args:
        parameters: live float32 parameters by name; the model is stepped through them.

    Raises:
        ValueError: a parameter is not float32, or not contiguous; or the run's scheme is another one.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], hparams: HParams) -> None:
        if hparams.sparseloco is None:
            raise ValueError(f"hparams choose the scheme {hparams.outer!r}, this is 'sparseloco'")
        check_parameters(parameters)
        self._parameters = {name: parameters[name].detach() for name in sorted(parameters)}
        self._constants = hparams.sparseloco
        self._eval_lr_factor = hparams.eval_lr_factor
        self._error = ErrorFeedback(self._parameters, hparams.stale_after_windows)
        self._momentum: dict[str, torch.Tensor] = {}
        if self._constants.outer_momentum:
            self._momentum = {name: torch.zeros_like(one) for name, one in self._parameters.items()}
        self.spec = PayloadSpec.from_hparams({name: one.shape for name, one in parameters.items()}, hparams)

    @torch.no_grad()
    def pack(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        step: int,
        window: int,
        uid: int,
        pages_digest: str,
        batches: int,
    ) -> bytes:
        """``e = decay * e + difference``; send the largest entries of ``e``; ``e -= what was sent``.

        What is subtracted is read back from the bytes, as every receiver will read it. ``tensors`` are the weights
        before the inner steps less those after them.
        """
        check_work(tensors, self._parameters)
        errors = self._error.begin(window)
        kept: dict[str, Coefficients] = {}
        for name, tensor in self.spec.tensors.items():
            errors[name].mul_(self._constants.error_feedback_decay).add_(tensors[name])
            kept[name] = _largest(errors[name], tensor)
        body = build(kept, self.spec, window=window, uid=uid, pages_digest=pages_digest, batches=batches)
        self._move(errors, parse(body, self.spec, window=window, uid=uid), sign=-1)
        return body

    @torch.no_grad()
    def restore(self, body: bytes, *, window: int, uid: int) -> None:
        """Add what the update held to the error feedback again."""
        self._move(self._error.tensors, parse(body, self.spec, window=window, uid=uid), sign=1)
        self._error.taken_back()

    def own_applied(self, window: int) -> None:
        """See ``OuterScheme``."""
        self._error.applied(window)

    @torch.no_grad()
    def apply(self, updates: Sequence[Update], *, step: int) -> None:
        """``m = momentum * m + mean; p -= lr * m``, or ``p -= lr * (mean + momentum * m)`` with Nesterov.

        Per parameter, a peer whose update is longer than the (lower) median of all is scaled down to it. Without
        updates nothing changes, momentum included: in a window that gathered nobody, all nodes keep what they have.
        """
        c, updates = self._constants, in_order(updates, self.spec)
        for name, tensor in self.spec.tensors.items():
            for rows, mean in self._means(updates, name):
                if c.outer_momentum:
                    momentum = _matrix(self._momentum[name], tensor.grid)[rows]
                    momentum.copy_(momentum.double().mul_(c.outer_momentum).add_(mean))
                    mean = mean + momentum.double().mul_(c.outer_momentum) if c.outer_nesterov else momentum.double()  # noqa: PLW2901
                band = _matrix(self._parameters[name], tensor.grid)[rows]
                band.copy_(torch.sub(band, mean.mul_(c.outer_learning_rate), out=mean))

    @torch.no_grad()
    def trial_step(self, name: str, update: Update, *, step: int) -> RowBlocks:
        """``p - lr * eval_lr_factor * decode(update)``."""
        grid, lr = self.spec.tensors[name].grid, self._constants.outer_learning_rate * self._eval_lr_factor
        before = _matrix(self._parameters[name], grid)
        indices, values = update.coefficients(name, before.device)
        for rows, chunks in grid.row_blocks(before.device):
            zeros = values.new_zeros(chunks.stop - chunks.start, grid.entries)
            change = grid.join(zeros.scatter_(1, indices[chunks], lr * values[chunks]))
            yield rows, torch.sub(before[rows], change, out=change)

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """``version``, the state of ``error_feedback.py``, and the outer momentum as ``shared.momentum.NAME``."""
        state = self._error.state_dict(copies=copies)
        momentum = {name: one.to("cpu", copy=True) if copies else one for name, one in self._momentum.items()}
        state["tensors"] |= {MOMENTUM + name: one for name, one in momentum.items()}
        return {"version": STATE_VERSION, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``OuterScheme``."""
        if state.get("version") != STATE_VERSION or "tensors" not in state:
            raise StateError(f"sparseloco: state of version {state.get('version')}; expected {STATE_VERSION}")
        found = {name: tensor for name, tensor in state["tensors"].items() if name.startswith(MOMENTUM)}
        if len(found) != len(self._momentum):
            raise StateError(
                f"sparseloco: momentum of {len(found)} tensors, expected {len(self._momentum)}: outer_momentum was "
                "another when this was saved"
            )
        momentum = checked_copies(
            {name.removeprefix(MOMENTUM): tensor for name, tensor in found.items()}, self._parameters, "sparseloco"
        )
        error = {name: tensor for name, tensor in state["tensors"].items() if name not in found}
        self._error.load_state_dict(
            {**{key: value for key, value in state.items() if key != "version"}, "tensors": error}
        )
        self._momentum = momentum

    def _move(self, errors: Mapping[str, torch.Tensor], update: Update, *, sign: int) -> None:
        """``e += sign * what receivers decode``."""
        for name, tensor in self.spec.tensors.items():
            matrix = _matrix(errors[name], tensor.grid)
            sent = decode_all([update], [tensor], matrix.device)
            for rows, total in weighted_sums(sent, [sign], tensor.grid):
                matrix[rows] += tensor.grid.join(total.float())

    def _means(self, updates: Sequence[Update], name: str) -> Iterator[tuple[slice, torch.Tensor]]:
        """The clipped mean of one tensor's updates, band by band: rows of the matrix, float64 [rows, cols].

        Peers count in ascending uid.
        """
        if not updates:
            return
        tensor = self.spec.tensors[name]
        peers = decode_all(updates, [tensor], self._parameters[name].device)
        factors = clip_to_median(norms(peers[1]).tolist())
        for rows, total in weighted_sums(peers, [factor / len(factors) for factor in factors], tensor.grid):
            yield rows, tensor.grid.join(total)


def _matrix(tensor: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    return tensor.view(grid.rows, grid.cols)


def _largest(errors: torch.Tensor, tensor: TensorSpec) -> Coefficients:
    matrix = _matrix(errors, tensor.grid)
    picked = [top_k(tensor.grid.cut(matrix[rows]), tensor.k) for rows, _ in tensor.grid.row_blocks(errors.device)]
    indices, values = zip(*picked, strict=True)
    return torch.cat(indices), torch.cat(values)

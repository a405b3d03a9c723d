"""DeMo: momentum whose largest DCT coefficients travel, and a step along the sign of their sum.

Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", arXiv 2411.19870, with two differences:

- What was sent leaves the momentum in every window, so a restart changes nothing.
- A coordinate is divided by the number of peers, not of those who sent it: nobody gains by indices that no one else
  sends.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tplr.compress.aggregate import norms
from tplr.compress.dct import inverse_sparse, transform, working_dtype
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Coefficients, Update, build, decode_all, parse
from tplr.compress.tensor_groups import TensorGroup, tensor_groups
from tplr.compress.topk import top_k
from tplr.errors import StateError
from tplr.hparams import HParams
from tplr.training.outer.base import RowBlocks
from tplr.training.outer.checks import check_parameters, check_work, in_order
from tplr.training.outer.error_feedback import ErrorFeedback
from tplr.training.outer.signs import signs_of_sum
from tplr.training.schedule import learning_rate

STATE_VERSION = 3


class DemoOuter:
    """See ``OuterScheme``.

    Args:
        parameters: live float32 parameters by name; the model is stepped through them.

    Raises:
        ValueError: a parameter is not float32, or not contiguous; or the run's scheme is another one.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], hparams: HParams) -> None:
        if hparams.demo is None:
            raise ValueError(f"hparams choose the scheme {hparams.outer!r}, this is 'demo'")
        check_parameters(parameters)
        self._parameters = {name: parameters[name].detach() for name in sorted(parameters)}
        self._constants = hparams.demo
        self._eval_lr_factor = hparams.eval_lr_factor
        self._momentum = ErrorFeedback(self._parameters, hparams.stale_after_windows)
        self.spec = PayloadSpec.from_hparams({name: parameter.shape for name, parameter in parameters.items()}, hparams)

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
        """``m = decay * m + lr * gradient``; send the largest coefficients of ``m``; ``m -= what was sent``.

        What is subtracted is read back from the bytes, as every receiver will read it.

        ``tensors`` are the gradients.
        """
        check_work(tensors, self._parameters)
        lr = self._learning_rate(step)
        momenta = self._momentum.begin(window)
        kept: dict[str, Coefficients] = {}
        for group in self._groups():
            row_blocks: list[Coefficients] = []
            for rows, _ in group.grid.row_blocks(self._device):
                for momentum, gradient in zip(
                    group.row_views(momenta, rows), group.row_views(tensors, rows), strict=True
                ):
                    momentum.mul_(self._constants.momentum_decay).add_(gradient, alpha=lr)
                row_blocks.append(largest_coefficients(momenta, group, rows))
            kept |= by_tensor(row_blocks, group)
        who = {"window": window, "uid": uid, "pages_digest": pages_digest, "batches": batches}
        body = build(kept, self.spec, **who)
        self._move(momenta, Update(spec=self.spec, body=body, **who), sign=-1)
        return body

    @torch.no_grad()
    def restore(self, body: bytes, *, window: int, uid: int) -> None:
        """Add what the update held to the momentum again."""
        self._move(self._momentum.tensors, parse(body, self.spec, window=window, uid=uid), sign=1)
        self._momentum.taken_back()

    def own_applied(self, window: int) -> None:
        """See ``OuterScheme``."""
        self._momentum.applied(window)

    def _move(self, momenta: Mapping[str, torch.Tensor], update: Update, *, sign: int) -> None:
        """``m += sign * what receivers decode``."""
        for group in self._groups():
            grid = group.grid
            (indices,), (values,) = decode_all([update], group.tensors, self._device)
            for rows, chunks in grid.row_blocks(self._device):
                what = values[chunks].to(working_dtype(self._device))
                group.add(momenta, rows, inverse_sparse(indices[chunks], what, grid), alpha=sign)

    @torch.no_grad()
    def apply(self, updates: Sequence[Update], *, step: int) -> None:
        """``p = p * (1 - lr * weight_decay) - lr * sign(sum over peers of decode(update) / its norm)``.

        The common divisor, the number of peers, does not change a sign and is left out. Without updates nothing
        changes, decay included: in a window that gathered nobody, all nodes keep what they have.
        """
        lr = self._learning_rate(step)
        updates = in_order(updates, self.spec)
        if not updates:
            return
        for group in self._groups():
            for rows, signs in self._directions(updates, group):
                if self._constants.weight_decay:
                    for band in group.row_views(self._parameters, rows):
                        band.mul_(1 - lr * self._constants.weight_decay)
                group.add(self._parameters, rows, signs, alpha=-lr)
                del signs  # the next slab's are made where these lie, in the cache

    @torch.no_grad()
    def trial_step(self, name: str, update: Update, *, step: int) -> RowBlocks:
        """``p - lr * eval_lr_factor * sign(decode(update))``."""
        lr, grid = self._learning_rate(step) * self._eval_lr_factor, self.spec.tensors[name].grid
        before = self._parameters[name].view(grid.rows, grid.cols)
        one = decode_all([update], [self.spec.tensors[name]], self._device)
        for rows, chunks in signs_of_sum(one, grid):
            signs = grid.join(chunks)
            yield rows, torch.sub(before[rows], signs, alpha=lr, out=signs)

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """``version``, and the state of ``error_feedback.py``."""
        return {"version": STATE_VERSION, **self._momentum.state_dict(copies=copies)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``OuterScheme``."""
        if state.get("version") != STATE_VERSION:
            raise StateError(f"demo: state of version {state.get('version')}; expected {STATE_VERSION}")
        self._momentum.load_state_dict({key: value for key, value in state.items() if key != "version"})

    def _learning_rate(self, step: int) -> float:
        return learning_rate(step, self._constants.learning_rate)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _groups(self) -> Iterator[TensorGroup]:
        return tensor_groups(self.spec, self._device)

    def _directions(self, updates: Sequence[Update], group: TensorGroup) -> Iterator[tuple[slice, torch.Tensor]]:
        """Signs of tensors' sums of updates, slab by slab: see ``signs_of_sum``."""
        indices, values = decode_all(updates, group.tensors, self._device)
        by_tensor = values.unflatten(1, (len(group.tensors), -1))
        # Of unit norm each: size does not buy influence.
        by_tensor /= (norms(by_tensor) + 1e-8).float()[..., None, None]
        yield from signs_of_sum((indices, values), group.grid)


def largest_coefficients(tensors: Mapping[str, torch.Tensor], group: TensorGroup, rows: slice) -> Coefficients:
    """Of a slab's DCT coefficients those that travel."""
    dtype = working_dtype(tensors[group.tensors[0].name].device)
    return top_k(transform(group.cut(tensors, rows).to(dtype), group.grid), group.k)


def by_tensor(row_blocks: Sequence[Coefficients], group: TensorGroup) -> dict[str, Coefficients]:
    """Of a batch's tensors each one's, from those of the slabs."""
    indices, values = (group.split(torch.cat(each)) for each in zip(*row_blocks, strict=True))
    return {tensor.name: (indices[i], values[i]) for i, tensor in enumerate(group.tensors)}

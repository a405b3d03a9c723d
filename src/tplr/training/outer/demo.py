"""DeMo: miners send the largest DCT coefficients of their momentum; the model steps along the sign of their sum.

Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", arXiv 2411.19870, with two differences:

- The sent part is subtracted from the momentum in every window, so a restart changes nothing.
- A coordinate is divided by the number of peers, not by the number of its senders: sending indices that nobody else
  sends gives no advantage.
"""

from collections.abc import Mapping, Sequence

import torch

from tplr.compress.aggregate import norms
from tplr.compress.chunks import ChunkGrid
from tplr.compress.dct import inverse_sparse, transform, working_dtype
from tplr.compress.payload import Coefficients, Update, decode_all
from tplr.compress.tensor_groups import TensorGroup
from tplr.compress.topk import select
from tplr.hparams import HParams
from tplr.training.outer.base import OuterScheme
from tplr.training.outer.norm_caps import MOST_WINDOWS, geometric_sum
from tplr.training.outer.signs import signs_of_sum, zero_limit
from tplr.training.schedule import learning_rate

NORM_EPSILON = 1e-8
# Largest norm of an honest miner's gradient, in units of the norm of the validator's present one: with fewer sequences
# a gradient has more noise, and earlier ones were longer.
LONGEST_GRADIENT = 30.0


class DemoOuter(OuterScheme):
    """See ``OuterScheme``. A miner's tensors are gradients, and its error feedback is the momentum."""

    name = "demo"
    state_version = 3

    def _configure(self, hparams: HParams) -> None:
        assert hparams.demo is not None
        self._constants = hparams.demo

    def in_basis(self, chunks: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
        """See ``OuterScheme``: the DCT."""
        return transform(chunks.to(working_dtype(chunks.device)), grid)

    def step_factors(self, name: str, lengths: Sequence[float], *, step: int) -> list[float]:
        """See ``OuterScheme``: unit norm, before the sign."""
        return (1 / _divisors(torch.tensor(lengths, dtype=torch.float64)).double()).tolist()

    def norm_cap(self, name: str, *, step: int) -> float:
        """See ``OuterScheme``: every norm counts as 1."""
        return 1.0

    def rate(self, step: int) -> float:
        """See ``OuterScheme``."""
        return learning_rate(step, self._constants.learning_rate)

    def largest_norm(self, step: int, *, gradient: float) -> float:
        """See ``OuterScheme``: the momentum of ``MOST_WINDOWS`` windows with one gradient of the largest norm.

        With a decay of 0.999 this is also above that of any number of windows with a gradient of 2.8 times the norm of
        the validator's.
        """
        schedule = self._constants.learning_rate
        rate = learning_rate(min(step, schedule.warmup_steps), schedule)
        return rate * geometric_sum(self._constants.momentum_decay, MOST_WINDOWS) * LONGEST_GRADIENT * gradient

    def expected_step(self, sign: int, own: Update | None, *, step: int) -> None:
        """See ``OuterScheme``: gradients are those of the agreed weights."""

    def _accumulate(
        self,
        group: TensorGroup,
        errors: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: int,
    ) -> dict[str, Coefficients]:
        """Compute ``m = decay * m + lr * gradient``; return the largest DCT coefficients of ``m``."""
        lr = self.rate(step)
        row_blocks: list[Coefficients] = []
        for bands, _ in group.grid.row_blocks(self._device):
            momenta, gradients = group.band_views(errors, bands), group.band_views(tensors, bands)
            for momentum, gradient in zip(momenta, gradients, strict=True):
                momentum.mul_(self._constants.momentum_decay).add_(gradient, alpha=lr)
            row_blocks.append(largest_coefficients(errors, group, bands))
        return by_tensor(row_blocks, group)

    def _add_decoded(
        self, group: TensorGroup, errors: Mapping[str, torch.Tensor], update: Update, *, sign: int
    ) -> None:
        grid = group.grid
        (indices,), (values,) = decode_all([update], group.tensors, self._device)
        for bands, chunks in grid.row_blocks(self._device):
            what = values[chunks].to(working_dtype(self._device))
            group.add(errors, bands, inverse_sparse(indices[chunks], what, grid), alpha=sign)

    def _apply(
        self,
        group: TensorGroup,
        parameters: Mapping[str, torch.Tensor],
        updates: Sequence[Update],
        step: int,
        share: float,
    ) -> None:
        """Compute ``p = p * (1 - lr * weight_decay) - lr * sign(sum over peers of decode(update) / norm(update))``.

        Updates are scaled to unit norm for each tensor, so a larger one has no more influence. The common divisor, the
        number of peers, does not change a sign and is left out. ``lr`` is the learning rate times ``share``.
        """
        lr = self.rate(step) * share
        indices, values = decode_all(updates, group.tensors, self._device)
        per_tensor = values.unflatten(1, (len(group.tensors), -1))
        per_tensor /= _divisors(norms(per_tensor))[..., None, None]
        for bands, signs in signs_of_sum((indices, values), group.grid, zero_limit(updates)):
            if self._constants.weight_decay:
                for parameter in group.band_views(parameters, bands):
                    parameter.mul_(1 - lr * self._constants.weight_decay)
            group.add(parameters, bands, signs, alpha=-lr)
            del signs  # so that the next row block uses the same memory, which is in the cache

    def _trial_step(
        self, group: TensorGroup, parameters: Mapping[str, torch.Tensor], update: Update, step: int, share: float
    ) -> None:
        """Compute ``p -= lr * share * sign(decode(update))``."""
        lr = self.rate(step) * share
        for bands, signs in signs_of_sum(decode_all([update], group.tensors, self._device), group.grid):
            group.add(parameters, bands, signs, alpha=-lr)


def _divisors(lengths: torch.Tensor) -> torch.Tensor:
    """Return the divisors (float32) for updates of these norms (float64): the norm plus a tiny number, for norm 0."""
    return (lengths + NORM_EPSILON).float()


def largest_coefficients(tensors: Mapping[str, torch.Tensor], group: TensorGroup, bands: slice) -> Coefficients:
    """Return the k largest DCT coefficients of each chunk of a row block, which are sent: [chunks, k] each."""
    dtype = working_dtype(tensors[group.tensors[0].name].device)
    return select(transform(group.cut(tensors, bands).to(dtype), group.grid), group.k, grouped=group.grouped)


def by_tensor(row_blocks: Sequence[Coefficients], group: TensorGroup) -> dict[str, Coefficients]:
    """Join the coefficients of a group's row blocks to those of each tensor."""
    indices, values = (group.split(torch.cat(each)) for each in zip(*row_blocks, strict=True))
    return {tensor.name: (indices[i], values[i]) for i, tensor in enumerate(group.tensors)}

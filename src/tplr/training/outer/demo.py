"""DeMo: momentum whose largest DCT coefficients travel, and a step along the sign of their sum.

Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", arXiv 2411.19870, with two differences:

- What was sent leaves the momentum in every window, so a restart changes nothing.
- A coordinate is divided by the number of peers, not of those who sent it: nobody gains by indices that no one else
  sends.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tplr.compress.chunks import ChunkGrid
from tplr.compress.dct import inverse, transform
from tplr.compress.layout import PayloadSpec, TensorPlace
from tplr.compress.payload import Coefficients, Update, build, parse
from tplr.compress.topk import top_k
from tplr.errors import StateError, TrainingError
from tplr.hparams import HParams
from tplr.training.schedule import learning_rate

STATE_VERSION = 1
# A gradient entry above it is as useless as an infinite one, and nothing below it overflows on the way to the wire.
LARGEST_GRADIENT = 2.0**60
# Where coefficients cancel, float64 leaves some 1e-16 of them, of either sign, depending on the machine. Quantized
# values cancel often. What is below this part of the coefficients' magnitude counts as zero.
CANCELLED = 1e-10


class DemoOuter:
    """See ``OuterScheme``.

    Args:
        parameters: live float32 parameters by name; the model is stepped through them.

    Raises:
        ValueError: a parameter is not float32, or not contiguous.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], hparams: HParams) -> None:
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32 or not parameter.is_contiguous():
                raise ValueError(
                    f"{name}: {parameter.dtype}, contiguous {parameter.is_contiguous()}; expected contiguous float32 "
                    "(a step of the learning rate is lost in anything shorter)"
                )
        self._parameters = {name: parameters[name].detach() for name in sorted(parameters)}
        self._hparams = hparams
        # Only miners need it, so it is made when first packed.
        self._momentum: dict[str, torch.Tensor] = {}
        self.spec = PayloadSpec.of(
            {name: parameter.shape for name, parameter in parameters.items()},
            outer="demo",
            target_chunk=hparams.target_chunk,
            topk=hparams.topk_compression,
            bits=hparams.quantization_bits,
        )

    @torch.no_grad()
    def pack(
        self,
        gradients: Mapping[str, torch.Tensor],
        *,
        step: int,
        window: int,
        uid: int,
        pages_digest: str,
        batches: int,
    ) -> bytes:
        """``m = decay * m + lr * gradient``; send the largest coefficients of ``m``; ``m -= what was sent``.

        What is subtracted is read back from the bytes, as every receiver will read it.

        Raises:
            TrainingError: a gradient entry is not finite; nothing has changed.
            ValueError: gradients are missing, unknown or of another shape.
        """
        self._check(gradients)
        lr = self._learning_rate(step)
        if not self._momentum:
            self._momentum = {name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()}
        kept: dict[str, Coefficients] = {}
        for name, place in self.spec.tensors.items():
            momentum = self._momentum[name]
            momentum.mul_(self._hparams.momentum_decay).add_(gradients[name], alpha=lr)
            kept[name] = _largest(momentum, place)
        body = build(kept, self.spec, window=window, uid=uid, pages_digest=pages_digest, batches=batches)
        sent = parse(body, self.spec, window=window, uid=uid)
        for name, place in self.spec.tensors.items():
            momentum = _matrix(self._momentum[name], place.grid)
            indices, values = sent.coefficients(name, momentum.device)
            for rows, chunks in place.grid.slabs():
                dense = momentum.new_zeros(values[chunks].shape[0], place.grid.entries, dtype=torch.float64)
                dense.scatter_(1, indices[chunks], values[chunks].double())
                momentum[rows] -= inverse(dense, place.grid).float()
        return body

    @torch.no_grad()
    def apply(self, updates: Sequence[Update], *, step: int) -> None:
        """``p = p * (1 - lr * weight_decay) - lr * sign(sum over peers of decode(update) / its norm)``.

        The common divisor, the number of peers, does not change a sign and is left out. Without updates nothing
        changes, decay included: in a window that gathered nobody, all nodes keep what they have.

        Raises:
            ValueError: updates of different windows, of one uid twice, or of another layout.
        """
        lr = self._learning_rate(step)
        for name, rows, signs in self._directions(updates):
            band = _matrix(self._parameters[name], self.spec.tensors[name].grid)[rows]
            band.mul_(1 - lr * self._hparams.weight_decay).sub_(signs, alpha=lr)

    @contextmanager
    def probe(self, update: Update, *, step: int) -> Iterator[None]:
        """Within: ``p -= lr * eval_lr_factor * sign(decode(update))``. Afterwards: the bytes of before.

        Takes memory for one copy of the parameters.
        """
        lr = self._learning_rate(step) * self._hparams.eval_lr_factor
        before = {name: parameter.clone() for name, parameter in self._parameters.items()}
        try:
            for name, rows, signs in self._directions([update]):
                _matrix(self._parameters[name], self.spec.tensors[name].grid)[rows].sub_(signs, alpha=lr)
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.copy_(before[name])

    def state_dict(self) -> dict[str, Any]:
        """``version`` and ``momentum``, by name; empty if nothing was packed yet."""
        return {
            "version": STATE_VERSION,
            "momentum": {name: momentum.to("cpu", copy=True) for name, momentum in self._momentum.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a momentum.

        Raises:
            StateError: another version or other keys, tensors, shapes or types, or not finite; nothing has changed.
        """
        if state.keys() != {"version", "momentum"} or state["version"] != STATE_VERSION:
            raise StateError(f"demo: keys {sorted(state)}, version {state.get('version')}; expected {STATE_VERSION}")
        momentum: Mapping[str, torch.Tensor] = state["momentum"]
        if momentum and momentum.keys() != self._parameters.keys():
            changed = sorted(momentum.keys() ^ self._parameters.keys())
            raise StateError(f"demo: momentum of {changed[:3]} is missing or unknown: it is of another model")
        for name, tensor in momentum.items():
            shape = self._parameters[name].shape
            if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.isfinite().all():
                raise StateError(
                    f"demo: momentum of {name} is {tensor.dtype} {tuple(tensor.shape)}; expected finite float32 "
                    f"{tuple(shape)}"
                )
        self._momentum = {
            name: momentum[name].to(self._parameters[name].device, copy=True).contiguous() for name in momentum
        }

    def _learning_rate(self, step: int) -> float:
        h = self._hparams
        return learning_rate(step, peak=h.learning_rate, warmup_steps=h.warmup_steps, t_max=h.t_max)

    def _check(self, gradients: Mapping[str, torch.Tensor]) -> None:
        if gradients.keys() != self._parameters.keys():
            raise ValueError(f"gradients of {sorted(gradients.keys() ^ self._parameters.keys())} missing or unknown")
        for name, gradient in gradients.items():
            if gradient.shape != self._parameters[name].shape:
                raise ValueError(f"{name}: gradient of {tuple(gradient.shape)}, {tuple(self._parameters[name].shape)}")
            if not (gradient.abs() <= LARGEST_GRADIENT).all():
                raise TrainingError(f"{name}: the gradient is not finite; send nothing for this window")

    def _directions(self, updates: Sequence[Update]) -> Iterator[tuple[str, slice, torch.Tensor]]:
        """Signs of the sum of updates, band by band: name, rows of the matrix, float32 [rows, cols] of -1, 0, 1.

        Peers in ascending uid, in float64. A row of indices has no duplicates, so nothing is added in an order
        that is left open.
        """
        updates = sorted(updates, key=lambda update: update.uid)
        identities = [(update.window, update.uid, update.spec.layout) for update in updates]
        if len(set(identities)) < len(updates) or len({(window, layout) for window, _, layout in identities}) > 1:
            raise ValueError(f"updates (window, uid, layout) {identities}: expected each uid once, of one window")
        if any(update.spec.layout != self.spec.layout for update in updates):
            raise ValueError(f"updates of layout {updates[0].spec.layout}; expected {self.spec.layout}")
        for name, place in self.spec.tensors.items() if updates else ():
            device = self._parameters[name].device
            peers = [_of_unit_norm(update.coefficients(name, device)) for update in updates]
            for rows, chunks in place.grid.slabs():
                count = chunks.stop - chunks.start
                total = torch.zeros(count, place.grid.entries, dtype=torch.float64, device=device)
                magnitude = torch.zeros(count, dtype=torch.float64, device=device)
                for indices, values in peers:
                    where, what = indices[chunks], values[chunks]
                    total.scatter_(1, where, total.gather(1, where) + what)
                    magnitude += what.abs().amax(dim=1)
                yield name, rows, _signs(inverse(total, place.grid), magnitude, place.grid)


def _matrix(tensor: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    return tensor.view(grid.rows, grid.cols)


def _largest(momentum: torch.Tensor, place: TensorPlace) -> Coefficients:
    matrix = _matrix(momentum, place.grid)
    picked = [top_k(transform(matrix[rows], place.grid).float(), place.k) for rows, _ in place.grid.slabs()]
    indices, values = zip(*picked, strict=True)
    return torch.cat(indices), torch.cat(values)


def _of_unit_norm(coefficients: Coefficients) -> Coefficients:
    """One peer's values of one parameter over their own norm: size does not buy influence."""
    indices, values = coefficients[0], coefficients[1].double()
    return indices, values / (values.norm() + 1e-8)


def _signs(band: torch.Tensor, magnitude: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
    """-1, 0 or 1 for each entry, 0 where what was added has cancelled out. ``magnitude`` is per chunk."""
    chunks = band.view(-1, grid.chunk_rows, grid.cols // grid.chunk_cols, grid.chunk_cols)
    floor = CANCELLED * magnitude.view(len(chunks), 1, -1, 1)
    return torch.where(chunks.abs() > floor, chunks.sign(), 0).view(-1, grid.cols).float()

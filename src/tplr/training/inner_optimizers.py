"""The optimizer of the inner steps: AdamW for all tensors, or Muon for hidden matrices and AdamW for the rest.

Muon (https://kellerjordan.github.io/posts/muon) steps along the momentum with all singular values set to about 1.
It behaves like ``torch.optim.Muon`` with Nesterov momentum and ``adjust_lr_fn="match_rms_adamw"`` (arXiv 2502.16982):
both optimizers share one learning rate and one weight decay. Matrices of one shape are orthogonalized in one operation
(``BATCH_ENTRIES``): a kernel for each small matrix would take longer to start than to run. Over several ranks, the
momentum is sharded like its parameter, and one rank gathers each matrix to orthogonalize it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from tplr.hparams import Precision, SparselocoParams
from tplr.training.device import DeviceSettings
from tplr.training.parallel import ParallelContext, local_rows

ADAMW = ("exp_avg", "exp_avg_sq")  # names of torch.optim.AdamW's moments
MUON = ("momentum_buffer",)  # name of torch.optim.Muon's moment
# torch.optim.Muon's coefficients, iterations and smallest norm, and the RMS that makes a step as long as AdamW's.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7
RMS = 0.2
BATCH_ENTRIES = 2**24  # of the matrices that a rank orthogonalizes in one operation, unless a single one has more


class InnerOptimizer:
    """The inner optimizer. It keeps its moments from window to window and changes them in place.

    Args:
        parameters: the model's, float32; only their shapes and their device are used.
        precision: of Muon's matrix products; ``torch.optim.Muon`` uses ``bfloat16``.

    Attributes:
        layout: the parameter of each moment, by ``MOMENT.PARAMETER``.
        moments: by the names of ``layout``, sharded like the parameters; empty before the first step.
        steps_done: AdamW's own count, for the bias correction of its moments.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        constants: SparselocoParams,
        precision: Precision,
        settings: DeviceSettings,
        parallel: ParallelContext,
    ) -> None:
        self._constants = constants
        self._dtype = getattr(torch, precision)
        self._settings = settings
        self._parallel = parallel
        by_muon = constants.inner_optimizer == "muon"
        matrices = {name: one for name, one in parameters.items() if by_muon and is_hidden_matrix(name, one.shape)}
        self._muon = frozenset(matrices)
        self._batches = _batches({name: tuple(one.shape) for name, one in matrices.items()}, parallel.size)
        self.layout = {
            f"{moment}.{name}": one
            for name, one in parameters.items()
            for moment in (MUON if name in self._muon else ADAMW)
        }
        self.moments: dict[str, torch.Tensor] = {}
        self.steps_done = 0
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._adamw: torch.optim.AdamW | None = None

    def reset(self) -> None:
        """Discard the moments."""
        self.moments, self.steps_done = {}, 0

    def begin(self, model: torch.nn.Module) -> None:
        """Set the model whose parameters the next steps change."""
        c = self._constants
        self._parameters = dict(model.named_parameters())
        self._adamw = torch.optim.AdamW(
            [one for name, one in self._parameters.items() if name not in self._muon],
            lr=0.0,  # set before each step
            betas=(c.adam_beta1, c.adam_beta2),
            eps=c.adam_epsilon,
            weight_decay=c.weight_decay,
            fused=self._settings.fused_adamw,
            foreach=not self._settings.fused_adamw,
        )
        if self.moments:
            self._give_moments()

    def step(self, learning_rate: float) -> None:
        """Take a step along the gradients of the model given to ``begin``."""
        assert self._adamw is not None
        if not self.moments:
            self.moments = {name: torch.zeros_like(one.detach()) for name, one in self.layout.items()}
            self._give_moments()
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()
        for rounds in self._batches:
            self._step_matrices(rounds, learning_rate)
        self.steps_done += 1

    def _give_moments(self) -> None:
        assert self._adamw is not None
        for name, parameter in self._parameters.items():
            if name not in self._muon:
                # The fused kernel reads the count on the device.
                steps_device = parameter.device if self._settings.fused_adamw else "cpu"
                state = {"step": torch.tensor(float(self.steps_done), device=steps_device)}
                self._adamw.state[parameter] = state | {moment: self.moments[f"{moment}.{name}"] for moment in ADAMW}

    @torch.no_grad()
    def _step_matrices(self, rounds: Sequence[Sequence[str | None]], learning_rate: float) -> None:
        """``m += (1 - momentum) * (g - m)``, orthogonalize ``g + momentum * (m - g)``, decay weights, step.

        Args:
            rounds: in each round, the matrix that each rank gathers and orthogonalizes, or None; all have one shape.
        """
        momentum = self._constants.muon_momentum
        assert momentum is not None
        directions = {}
        for name in filter(None, chain.from_iterable(rounds)):
            gradient = self._parameters[name].grad
            assert gradient is not None, f"{name} takes no part in the loss"
            g, m = local_rows(gradient)[0], local_rows(self.moments[f"{MUON[0]}.{name}"])[0]
            m.lerp_(g, 1 - momentum)
            directions[name] = torch.empty_like(gradient, dtype=self._dtype)
            local_rows(directions[name])[0].copy_(g.lerp(m, momentum))
        shards = [[None if name is None else directions[name] for name in names] for names in rounds]
        wholes = [self._parallel.gather(one) for one in shards]
        mine = zip((names[self._parallel.rank] for names in rounds), wholes, strict=True)
        _orthogonalize({name: whole for name, whole in mine if name and whole is not None})
        for whole, one in zip(wholes, shards, strict=True):
            self._parallel.scatter(whole, one)
        for name, direction in directions.items():
            parameter = local_rows(self._parameters[name].detach())[0]
            rate = learning_rate * RMS * math.sqrt(max(matrices_shape(name, direction.shape)[-2:]))
            parameter.mul_(1 - learning_rate * self._constants.weight_decay)
            parameter.add_(local_rows(direction)[0], alpha=-rate)


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon steps this parameter: matrices of decoder layers, except the router of a mixture of experts.

    AdamW steps embedding, head (tied or not) and vectors of every model type.
    """
    return ".layers." in name and len(shape) > 1 and not name.endswith(".mlp.gate.weight")


def matrices_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the matrices in a parameter: its own, or [matrices, rows, columns] for experts.

    ``transformers`` stores experts as [experts, rows, columns], and joins the rows of an expert's gate and up
    projection.
    """
    if len(shape) == 2:
        return tuple(shape)
    parts = 2 if name.endswith("gate_up_proj") else 1
    return shape[0] * parts, shape[1] // parts, shape[2]


def orthogonalized(matrices: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Bring the singular values to between 0.7 and 1.2 by Newton-Schulz iterations, in the dtype of ``matrices``.

    Args:
        matrices: [rows, columns], or [matrices, rows, columns].
        out: written to and returned if given; may be ``matrices``.
    """
    a, b, c = COEFFICIENTS
    addmm = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    out = torch.empty_like(matrices) if out is None else out
    tall = matrices.shape[-2] > matrices.shape[-1]
    x, last = (matrices.mT, out.mT) if tall else (matrices, out)
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for iteration in range(ITERATIONS):
        gram = x @ x.mT
        target = last if iteration == ITERATIONS - 1 else None
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a, out=target)
    return out


def _orthogonalize(tensors: Mapping[str, torch.Tensor]) -> None:
    """Orthogonalize all matrices of tensors of one shape, in place."""
    stacks = [one.view(-1, *matrices_shape(name, one.shape)[-2:]) for name, one in tensors.items()]
    if len(stacks) == 1:
        orthogonalized(stacks[0], out=stacks[0])
    elif stacks:
        parts = orthogonalized(torch.cat(stacks)).split([len(one) for one in stacks])
        for stack, part in zip(stacks, parts, strict=True):
            stack.copy_(part)


def newton_schulz_flops(name: str, shape: Sequence[int]) -> int:
    """Return the number of floating-point operations of ``orthogonalized`` for one parameter."""
    *count, rows, columns = matrices_shape(name, shape)
    short, long = min(rows, columns), max(rows, columns)
    return math.prod(count) * ITERATIONS * (4 * short**2 * long + 2 * short**3)


def _batches(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> list[list[list[str | None]]]:
    """Assign one tensor of equal shape to each rank in each round, and join rounds up to ``BATCH_ENTRIES`` a rank."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        by_shape.setdefault(matrices_shape(name, shape), []).append(name)
    found = []
    for shape, names in by_shape.items():
        padded = [*names, *[None] * (-len(names) % ranks)]
        rounds = [padded[start : start + ranks] for start in range(0, len(padded), ranks)]
        size = max(1, BATCH_ENTRIES // math.prod(shape))
        found += [rounds[start : start + size] for start in range(0, len(rounds), size)]
    return found

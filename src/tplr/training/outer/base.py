"""The outer scheme: converts a miner's tensors to its update, and all miners' updates to a step of the model."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch

from tplr.compress.chunks import ChunkGrid
from tplr.compress.layout import PayloadSpec, TensorSpec
from tplr.compress.payload import Coefficients, Update, empty_body, fill, parse
from tplr.compress.tensor_groups import TensorGroup
from tplr.errors import EmptyUpdate, StateError, TrainingError
from tplr.hparams import HParams
from tplr.training.device import DEFAULTS, DeviceSettings
from tplr.training.local import Stop
from tplr.training.outer.error_feedback import ErrorFeedback
from tplr.training.outer.norm_caps import HISTORY
from tplr.training.outer.owners import TensorOwners
from tplr.training.parallel import SINGLE_PROCESS, ParallelContext, local_rows, together
from tplr.training.saved import checked_copies

# Name prefixes of the state tensors that are equal on all nodes.
MOMENTUM = "shared.momentum."
CAPS = "shared.caps."
# Larger entries are as useless as infinite ones; smaller ones never overflow while they are packed.
LARGEST_ENTRY = 2.0**60


class OuterScheme(ABC):
    """Holds the model's live parameters, the outer momentum and, on a miner, its error feedback.

    Over several ranks, parameters and a miner's tensors are shards. Each tensor has an owner rank, which holds its
    error feedback and momentum whole, and gathers the tensor itself to work on it (``owners.py``). All ranks call all
    methods in the same order.

    ``step`` counts the outer steps of the run, from 0. A window in which no update was applied is not a step.

    Args:
        parameters: live float32 parameters by name; the scheme steps the model through them.

    Attributes:
        spec: layout of the run's updates.

    Raises:
        ValueError: a parameter is not float32, or not contiguous; or hparams choose another scheme.
    """

    name: ClassVar[str]
    state_version: ClassVar[int]

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        hparams: HParams,
        settings: DeviceSettings = DEFAULTS,
        parallel: ParallelContext = SINGLE_PROCESS,
    ) -> None:
        if hparams.outer != self.name:
            raise ValueError(f"hparams choose the scheme {hparams.outer!r}, this is {self.name!r}")
        _check_parameters(parameters)
        self.spec = PayloadSpec.from_hparams({name: one.shape for name, one in parameters.items()}, hparams)
        self._parameters = {name: parameters[name] for name in sorted(parameters)}
        self._device = next(iter(self._parameters.values())).device
        self._eval_lr_factor = hparams.eval_lr_factor
        self._stale_after = hparams.stale_after_windows
        self._settings = settings
        self._parallel = parallel
        self._owners = TensorOwners(self.spec, self._device, parallel)
        self._owned = {name: self._parameters[name] for name in self._owners.mine}
        self._error_feedback = self._new_error_feedback()
        self._momentum: dict[str, torch.Tensor] = {}  # outer momentum, if the scheme has one
        self._cap_history: dict[str, torch.Tensor] = {}  # norm caps of the last windows, if the scheme clips
        self._configure(hparams)

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
        """Return a miner's update: ``e = accumulate(e, tensors)``; send the largest of ``e``; ``e -= decode(sent)``.

        The subtracted value is decoded from the bytes, as every receiver decodes it. The parameters do not change.

        Args:
            tensors: of the miner's ``LocalWork``: float32, by parameter name, in its parameter's shape.

        Raises:
            TrainingError: an entry is not finite; nothing has changed.
            ValueError: tensors are missing, unknown or of another shape.
        """
        with together(self._parallel):
            _check_work(tensors, self._parameters)
        self._error_feedback.begin(window)
        metadata = {"window": window, "uid": uid, "pages_digest": pages_digest, "batches": batches}
        body = empty_body(self.spec, **metadata)
        coefficients: dict[str, Coefficients] = {}
        for group, work in self._owners.whole(tensors):
            with self._error_feedback.on_device([one.name for one in group.tensors]) as errors:
                coefficients |= self._accumulate(group, errors, work, step)
        fill(body, coefficients, self.spec, window=window, uid=uid)
        self._add_to_errors(Update(spec=self.spec, body=bytes(body), **metadata), sign=-1)
        return self._join(body)

    def reset_if_stale(self, window: int) -> None:
        """Reset error feedback that is too old for this window: ``expected_step`` must not move weights by it."""
        self._error_feedback.reset_if_stale(window)

    def _add_to_errors(self, update: Update, *, sign: int) -> None:
        """Compute ``errors += sign * decode(update)`` for the tensors that this rank owns."""
        for group in self._owners.groups(self._parallel.rank):
            with self._error_feedback.on_device([one.name for one in group.tensors]) as errors:
                self._add_decoded(group, errors, update, sign=sign)

    def _new_error_feedback(self) -> ErrorFeedback:
        return ErrorFeedback(self._owned, self._stale_after, offload=self._settings.offload_error_feedback)

    def _join(self, body: bytearray) -> bytes:
        """Join the sections that each rank has filled; return the whole body on every rank."""
        sections = [self.spec.tensors[name].sections for name in self._owners.mine]
        mine = b"".join(body[section] for of_tensor in sections for section in of_tensor)
        for rank, data in enumerate(self._parallel.gather_bytes(mine)):
            start = 0
            for section in (one for name in self._owners.of_rank[rank] for one in self.spec.tensors[name].sections):
                size = section.stop - section.start
                body[section] = data[start : start + size]
                start += size
        return bytes(body)

    @torch.no_grad()
    def restore(self, body: bytes, *, window: int, uid: int) -> None:
        """Add the last packed update, which no node received, back to the error feedback, up to float32 rounding.

        Does nothing if the error feedback was reset since: the update contains the values that the reset dropped.
        """
        if self._error_feedback.empty:
            return
        with suppress(EmptyUpdate):
            self._add_to_errors(parse(body, self.spec, window=window, uid=uid), sign=1)
        self._error_feedback.restored(window)

    def own_applied(self, window: int) -> None:
        """Record that all nodes applied this node's update of a window; see ``ErrorFeedback.applied``."""
        self._error_feedback.applied(window)

    @torch.no_grad()
    def apply(self, updates: Sequence[Update], *, step: int) -> None:
        """Take the outer step in place. The same updates give the same bytes, in any order.

        Without updates nothing changes, including decay and momentum: all nodes keep their state.

        Raises:
            ValueError: updates of different windows, of one uid twice, or of another layout.
        """
        self._take(updates, step, share=1.0)

    @torch.no_grad()
    def part_of_step(self, updates: Sequence[Update], *, step: int, share: float) -> None:
        """Take a share, below 1, of the step of ``apply`` in place; momentum and norm caps do not change.

        Raises:
            ValueError: as ``apply``.
        """
        assert share < 1
        self._take(updates, step, share)

    def _take(self, updates: Sequence[Update], step: int, share: float) -> None:
        updates = _in_order(updates, self.spec)
        if updates:
            for group, parameters in self._owners.whole(self._parameters, write_back=True):
                self._apply(group, parameters, updates, step, share)

    def set_caps(self, updates: Sequence[Update], *, step: int) -> None:
        """Set the norm caps of a window from its updates before they are applied.

        ``trial_step`` and ``step_factors`` use them until ``apply``. Without them, the largest possible caps are used.

        Raises:
            ValueError: as ``apply``.
        """
        _in_order(updates, self.spec)

    @torch.no_grad()
    def trial_step(self, update: Update, *, step: int, share: float | None = None) -> None:
        """Take a part of the step along this update alone, clipped like the outer step.

        Changes the parameters in place; momentum and caps do not change.

        Args:
            share: share of the step; by default ``eval_lr_factor``.
        """
        share = self._eval_lr_factor if share is None else share
        for group, parameters in self._owners.whole(self._parameters, write_back=True):
            self._trial_step(group, parameters, update, step, share)

    @abstractmethod
    def expected_step(self, sign: int, own: Update | None, *, step: int) -> None:
        """Move a miner's agreed weights, in place, to those that it trains from: expected once its own work is in them.

        Args:
            sign: 1; or -1 to reverse it, up to float32 rounding.
            own: this miner's last update, if it is not applied yet.
        """

    def whole(
        self, shards: Mapping[str, torch.Tensor], stop: Stop | None = None
    ) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Yield each tensor that this rank owns, whole; collective, ``stop`` and errors as ``TensorOwners.whole``."""
        for group, tensors in self._owners.whole(shards, stop=stop):
            yield from ((tensor, tensors[tensor.name]) for tensor in group.tensors)

    @abstractmethod
    def in_basis(self, chunks: torch.Tensor, grid: ChunkGrid) -> torch.Tensor:
        """Transform chunks to the orthonormal basis of an update's coordinates; both are [chunks, entries]."""

    @abstractmethod
    def step_factors(self, name: str, lengths: Sequence[float], *, step: int) -> list[float]:
        """Return the updates' factors in the step of one tensor, up to a factor that updates and tensors share.

        Args:
            name: name of a tensor that this rank owns.
            lengths: L2 norms of the tensor's values in each update.
        """

    @abstractmethod
    def norm_cap(self, name: str, *, step: int) -> float:
        """Return the L2 norm beyond which values of one tensor make its step no longer.

        No single window's updates move it far, so lengths in this unit can be compared between windows.
        """

    @abstractmethod
    def rate(self, step: int) -> float:
        """Return the learning rate of the outer step."""

    @abstractmethod
    def largest_norm(self, step: int, *, gradient: float) -> float:
        """Return the largest L2 norm of all values of an honest update. No update changes it.

        Args:
            gradient: L2 norm of the validator's gradient in this window.
        """

    @abstractmethod
    def _configure(self, hparams: HParams) -> None:
        """Set the constants of the scheme, and create its own tensors."""

    @abstractmethod
    def _accumulate(
        self,
        group: TensorGroup,
        errors: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: int,
    ) -> dict[str, Coefficients]:
        """Add a miner's tensors to its error feedback, in place; return the coefficients to send, by name."""

    @abstractmethod
    def _add_decoded(
        self, group: TensorGroup, errors: Mapping[str, torch.Tensor], update: Update, *, sign: int
    ) -> None:
        """Compute ``errors += sign * decode(update)`` for one group."""

    @abstractmethod
    def _apply(
        self,
        group: TensorGroup,
        parameters: Mapping[str, torch.Tensor],
        updates: Sequence[Update],
        step: int,
        share: float,
    ) -> None:
        """Take a share of the step of one group along these updates, at least one, in uid order.

        Only the whole step (``share`` 1) changes momentum and norm caps.
        """

    @abstractmethod
    def _trial_step(
        self, group: TensorGroup, parameters: Mapping[str, torch.Tensor], update: Update, step: int, share: float
    ) -> None:
        """Take the trial step of one group."""

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Return the state that must survive a restart: ``version``, ``window``, ``taken_back``, ``tensors`` by name.

        ``shared.momentum.NAME`` is the outer momentum and ``shared.caps.NAME`` the last windows' norm caps, both equal
        on all nodes; the other tensors are this miner's error feedback.

        Args:
            copies: return tensors as independent copies on the CPU; otherwise the live tensors, which must be written
                before they change.
        """
        state = self._error_feedback.state_dict(copies=copies)
        state["tensors"] |= {name: one.to("cpu", copy=True) if copies else one for name, one in self.shared.items()}
        return {"version": self.state_version, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; ``tensors`` are those that this rank owns.

        Raises:
            StateError: it belongs to another version, scheme or model, or is not finite; nothing has changed.
        """
        error_feedback = self._new_error_feedback()
        with together(self._parallel):
            if state.get("version") != self.state_version or "tensors" not in state:
                raise StateError(f"{self.name}: state of version {state.get('version')}; expected {self.state_version}")
            rest = {key: value for key, value in state.items() if key != "version"}
            shared = {name: one for name, one in rest["tensors"].items() if name.startswith((MOMENTUM, CAPS))}
            momentum, history = self._checked_shared(shared)
            rest["tensors"] = {name: one for name, one in rest["tensors"].items() if name not in shared}
            error_feedback.load_state_dict(rest)
        self._error_feedback, self._momentum, self._cap_history = error_feedback, momentum, history

    @property
    def shared(self) -> dict[str, torch.Tensor]:
        """This rank's live tensors that are equal on all nodes, by their names in ``state_dict``."""
        momentum = {MOMENTUM + name: one for name, one in self._momentum.items()}
        return momentum | {CAPS + name: one for name, one in self._cap_history.items()}

    def load_shared(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load outer momentum and norm caps, by their names in ``state_dict``, of the tensors that this rank owns.

        Raises:
            StateError: they belong to another model, or are not finite; nothing has changed.
        """
        with together(self._parallel):
            momentum, history = self._checked_shared(tensors)
        self._momentum, self._cap_history = momentum, history

    def reset_shared(self) -> None:
        """Reset outer momentum and norm caps to their values at the run's start."""
        self._momentum = {name: torch.zeros_like(one) for name, one in self._momentum.items()}
        self._cap_history = {name: torch.zeros_like(one) for name, one in self._cap_history.items()}

    def _checked_shared(
        self, shared: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Check a saved momentum and cap history, and return copies. Raises StateError."""
        momentum, history = (
            {name.removeprefix(prefix): one for name, one in shared.items() if name.startswith(prefix)}
            for prefix in (MOMENTUM, CAPS)
        )
        if len(momentum) != len(self._momentum):
            raise StateError(
                f"{self.name}: momentum of {len(momentum)} tensors, expected {len(self._momentum)}: the state was "
                "saved with another outer_momentum"
            )
        if len(history) != len(self._cap_history):
            raise StateError(f"{self.name}: norm caps of {len(history)} tensors, expected {len(self._cap_history)}")
        return (
            checked_copies(momentum, self._owned, self.name),
            checked_copies(history, self._cap_history, f"{self.name}, norm caps"),
        )

    @property
    def shared_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the tensors that are equal on all nodes, over all ranks."""
        shapes = {MOMENTUM + name: one.shape for name, one in self._parameters.items() if self._momentum}
        return shapes | {CAPS + name: torch.Size([HISTORY]) for name in self._parameters if self._cap_history}

    @property
    def others(self) -> set[str]:
        """Names in the other ranks' ``state_dict``."""
        names = self._parameters.keys() - self._owned.keys()
        return {prefix + name for name in names for prefix in ("", MOMENTUM, CAPS)}


def _check_parameters(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless all parameters are contiguous float32."""
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32 or not parameter.is_contiguous():
            raise ValueError(
                f"{name}: {parameter.dtype}, contiguous {parameter.is_contiguous()}; expected contiguous float32 "
                "(a shorter type loses steps of the learning rate)"
            )


def _check_work(tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    """Check the tensors that a miner is about to pack.

    Raises:
        TrainingError: an entry is not finite.
        ValueError: tensors are missing, unknown or of another shape.
    """
    if tensors.keys() != parameters.keys():
        raise ValueError(f"tensors {sorted(tensors.keys() ^ parameters.keys())} are missing or unknown")
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            raise ValueError(f"{name}: {tuple(tensor.shape)}, expected {tuple(parameters[name].shape)}")
        part, _ = local_rows(tensor.detach())
        if not part.numel():
            continue
        # One pass without a copy; NaN fails both comparisons.
        lowest, highest = part.aminmax()
        if not (lowest >= -LARGEST_ENTRY and highest <= LARGEST_ENTRY):
            raise TrainingError(f"{name}: training produced values that are not finite; no update for this window")


def _in_order(updates: Sequence[Update], spec: PayloadSpec) -> list[Update]:
    """Return one window's updates by ascending uid.

    Raises:
        ValueError: updates are from different windows, from one uid twice, or have another layout than ``spec``.
    """
    updates = sorted(updates, key=lambda update: update.uid)
    identities = [(update.window, update.uid, update.spec.layout) for update in updates]
    if len(set(identities)) < len(updates) or len({(window, layout) for window, _, layout in identities}) > 1:
        raise ValueError(f"updates (window, uid, layout) {identities}: expected each uid once, of one window")
    if any(update.spec.layout != spec.layout for update in updates):
        raise ValueError(f"updates of layout {updates[0].spec.layout}; expected {spec.layout}")
    return updates

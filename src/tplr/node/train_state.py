"""A node's training state in memory and on disk: weights, both halves of the scheme, values of the role."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update, parse
from tplr.errors import EmptyUpdate
from tplr.exchange.gather import GatherResult
from tplr.exchange.snapshot import read_manifest
from tplr.hparams import HParams
from tplr.keys import version_at
from tplr.node.free_memory import release_freed_memory
from tplr.node.state import SavedState, SnapshotDraft, StateFolder
from tplr.schemas import DebugReport, Evaluation
from tplr.seeds import fingerprint_seed, proof_seed
from tplr.training.alignment import Alignment, Gradient, align, probe_gradient
from tplr.training.commands import Commands, command
from tplr.training.device import DEFAULTS, DeviceSettings, host_copy
from tplr.training.evaluation import Baseline, baseline, evaluate, half_step_taken
from tplr.training.fingerprint import digest, fingerprint, outer_fingerprint
from tplr.training.inner import kept_weights
from tplr.training.local import LocalTraining, Stop, TrainStats, Unfinished, never
from tplr.training.model import set_first_weights
from tplr.training.outer.base import MOMENTUM, OuterScheme
from tplr.training.parallel import SINGLE_PROCESS, local_rows, together
from tplr.training.schemes import local_training, outer_scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATE_FORMAT = 7  # of the saved state; states of another format are skipped
PARTS = "parts"  # name of the role's values in a snapshot; a checkpoint has none, as they may be sealed scores
SHARED = "shared."  # prefix of the outer scheme's tensors that are equal on all nodes


def saved_fingerprints(saved: SavedState, *, seed: int, samples: int, whole: bool) -> tuple[str, str, str]:
    """Return fingerprint, outer fingerprint and digest of a saved state, as its node reported them. Blocks.

    Args:
        whole: whether the report has a digest; else it is empty.
    """
    model, outer = saved.lazily("model"), saved.lazily("outer")
    return (
        fingerprint(model, step=saved.manifest.global_step, seed=seed, samples=samples),
        outer_fingerprint(outer, seed=seed, samples=None if whole else samples),
        digest(model) if whole else "",
    )


class Stateful(Protocol):
    """A part of a role whose state is saved with the model, as plain JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TrainState:
    """The state that the next window's computation needs and that must survive a crash.

    With several ranks, each rank has an instance with its shards; rank 0 calls the methods, and those marked
    ``@command`` run on all ranks. Methods block.

    Attributes:
        commands: of the ranks; None in a single process.
        parameters: of ``model``, by name.
        outer, local: both halves of the scheme.
        snapshots: the saved states on disk.
        stateful: parts of the role that are saved with the model, by name.
        start_window: first window of the run; -1 until it is known.
        global_step: number of outer steps applied, the position of every schedule. A window without an applied update
            does not count.
        ending: whether the node is about to end: evaluations then end before their next batch or tensor, with
            TrainingError.
        loads: number of times another model replaced the present one, as after a restart or in a rollback.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        hparams: HParams,
        folder: Path,
        settings: DeviceSettings = DEFAULTS,
        commands: Commands | None = None,
    ) -> None:
        self.commands = commands
        self.model = model
        self.parameters = dict(model.named_parameters())
        self._parallel = commands.parallel if commands else SINGLE_PROCESS
        self.outer: OuterScheme = outer_scheme(self.parameters, hparams, settings, self._parallel)
        self.local: LocalTraining = local_training(self.parameters, hparams, settings, self._parallel)
        self._work: dict[str, torch.Tensor] = {}  # result of the last training, to be packed
        self._batches = np.empty(0)  # of the window being trained
        self._unfinished: Unfinished | None = None
        self._stop: Stop = never
        self._pause: Stop = never
        # This node's last packed update, until its window is applied.
        self._own: Update | None = None
        # Copies of this rank's rows of the weights, made for a save; None after an outer step or a restore.
        self._kept: dict[str, torch.Tensor] | None = None
        self._saving: tuple[SnapshotDraft, threading.Thread] | None = None
        self.stateful: dict[str, Stateful] = {}
        self.start_window = -1
        self.global_step = 0
        self.ending = False
        self.loads = 0
        self.snapshots = StateFolder(folder)
        self._hparams = hparams
        self._settings = settings

    @property
    def run(self) -> dict[str, Any]:
        """The identity of the run and the format: states and checkpoints with another one are refused."""
        return {
            "format": STATE_FORMAT,
            "version": str(self._hparams.version),
            "start_window": self.start_window,
            "init_seed": self._hparams.init_seed,
            "init_version": self._hparams.checkpoint_init_version,
            "layout": self.outer.spec.layout,
        }

    @property
    def spec(self) -> PayloadSpec:
        """Layout of the run's updates."""
        return self.outer.spec

    # Training

    def train(self, batches: np.ndarray, window: int, *, stop: Stop = never, pause: Stop = never) -> TrainStats:
        """Train on a window's batches until they end or ``stop()``; ``pack`` uses the result.

        If ``pause()`` stops it earlier, the result has ``paused`` set. While paused, the model has the weights that all
        nodes agree on, and may be changed in any way.

        Args:
            batches: token ids, batches by sequences by tokens.
            window: of the batches. Error feedback that is too old for it is reset first.
        """
        self._stop, self._pause = stop, pause  # rank 0's functions decide for all ranks
        return self._train(batches, window)

    def continue_training(self, *, stop: Stop = never, pause: Stop = never) -> TrainStats:
        """Continue a paused training; arguments and result as for ``train``."""
        self._stop, self._pause = stop, pause
        return self._continue_training()

    @command
    def _train(self, batches: np.ndarray, window: int) -> TrainStats:
        self._work, self._batches, self._unfinished = {}, batches, None
        self.outer.reset_if_stale(window)
        return self._run_inner_steps()

    @command
    def _continue_training(self) -> TrainStats:
        return self._run_inner_steps()

    def _run_inner_steps(self) -> TrainStats:
        unfinished, self._unfinished = self._unfinished, None
        kept, self._kept = self._kept, None
        work = self.local.run(
            self.model,
            self._batches,
            step=self.global_step + (self._own is not None),
            stop=self._stop,
            pause=self._pause,
            expect=partial(self.outer.expected_step, own=self._own, step=self.global_step),
            before=kept,
            unfinished=unfinished,
        )
        self._work, self._unfinished = work.tensors, work.unfinished
        work.train_stats.paused = work.unfinished is not None
        return work.train_stats

    @command
    def pack(self, *, window: int, uid: int, pages_digest: str, batches: int) -> bytes:
        """Return the packed update of the last training. Raises TrainingError, as ``OuterScheme.pack``."""
        work, self._work = self._work, {}
        body = self.outer.pack(
            work, step=self.global_step, window=window, uid=uid, pages_digest=pages_digest, batches=batches
        )
        if self._hparams.outer_delay:
            with contextlib.suppress(EmptyUpdate):
                self._own = parse(body, self.spec, window=window, uid=uid)
        return body

    @command
    def restore_update(self, body: bytes, *, window: int, uid: int) -> None:
        """Add the last packed update, which no node received, back to the error feedback."""
        self._own = None
        self.outer.restore(body, window=window, uid=uid)

    @command
    def own_applied(self, window: int) -> None:
        """Record that all nodes applied this node's update of a window; see ``ErrorFeedback.applied``."""
        self.outer.own_applied(window)

    # The model

    @command
    def apply(self, updates: Sequence[Update], window: int | None = None) -> None:
        """Take a window's outer step; without updates there is no step.

        Args:
            window: the applied window. If it is not given, this node's own update is not known to be in the model.
        """
        self._kept = None
        self.outer.apply(updates, step=self.global_step)
        self.global_step += bool(updates)
        if self._own and window is not None and self._own.window <= window:
            self._own = None
        release_freed_memory()

    @command
    def set_caps(self, updates: Sequence[Update]) -> None:
        """Set the updates of the window that will be applied next.

        Until ``apply``, trial steps are clipped as that step will be, and ``align`` uses its caps.
        """
        self.outer.set_caps(updates, step=self.global_step)

    @command
    def fingerprint(self, seed: int) -> str:
        """Return the hash of the number of steps and of the entries that ``seed`` selects."""
        samples = self._hparams.fingerprint_samples
        return fingerprint(self.parameters, step=self.global_step, seed=seed, samples=samples, parallel=self._parallel)

    @command
    def outer_fingerprint(self, seed: int, whole: bool = False) -> str:
        """Return the hash of the outer scheme's state that is equal on all nodes; ``whole``: of all its entries."""
        samples = None if whole else self._hparams.fingerprint_samples
        return outer_fingerprint(self.outer.shared, seed=seed, samples=samples, parallel=self._parallel)

    @command
    def digest(self) -> str:
        """Return the hash of the whole model."""
        return digest(self.parameters, self._parallel)

    @command
    def baseline(self, batches: np.ndarray) -> Baseline:
        """Compute the model's losses without any update. Raises TrainingError if one is not finite."""
        return baseline(
            self.model, batches, self._hparams.precision, self._parallel, self._settings, stop=self._is_ending
        )

    @command
    def evaluate(self, update: Update, assigned: np.ndarray | None, held_out: Baseline) -> Evaluation:
        """Evaluate ``update`` on this model; arguments and errors as ``training.evaluation.evaluate``."""
        return evaluate(
            self.model,
            self.outer,
            update,
            step=self.global_step,
            assigned=assigned,
            held_out=held_out,
            precision=self._hparams.precision,
            parallel=self._parallel,
            settings=self._settings,
            stop=self._is_ending,
        )

    @command
    def align(
        self, updates: Sequence[Update], batches: np.ndarray, seed: int, together: int = 0
    ) -> tuple[Baseline, Alignment]:
        """Align a window's updates with the gradient on held-out pages, by one forward and backward pass.

        Args:
            seed, together: as in ``training.alignment.align``.

        Returns:
            The model's losses on these pages, and the inner products.

        Raises:
            TrainingError: a loss or the gradient is not finite.
        """
        gradient = self._gradient(batches)
        return gradient.baseline, self._align(gradient, updates, seed, together)

    @command
    def middle_alignment(
        self, included: Sequence[Update], updates: Sequence[Update], batches: np.ndarray, seed: int, together: int = 0
    ) -> Alignment:
        """As ``align``, without the products of pairs, with the gradient after half of the step along ``included``."""
        with half_step_taken(self.model, self.outer, included, step=self.global_step):
            gradient = self._gradient(batches)
        return self._align(gradient, updates, seed, together, pairs=False)

    @command
    def own_alignment(
        self, updates: Sequence[Update], batches: np.ndarray, seed: int, together: int = 0
    ) -> tuple[float, ...]:
        """As ``align``, with the gradient on one miner's assigned pages; returns only the products, in uid order."""
        return self._align(self._gradient(batches), updates, seed, together, pairs=False).products

    def _align(
        self, gradient: Gradient, updates: Sequence[Update], seed: int, together: int, *, pairs: bool = True
    ) -> Alignment:
        return align(
            self.outer,
            gradient.tensors,
            updates,
            step=self.global_step,
            seed=seed,
            parallel=self._parallel,
            pairs=pairs,
            together=together,
            stop=self._is_ending,
        )

    def _gradient(self, batches: np.ndarray) -> Gradient:
        return probe_gradient(
            self.model,
            batches,
            self._hparams.precision,
            parallel=self._parallel,
            settings=self._settings,
            stop=self._is_ending,
        )

    def _is_ending(self) -> bool:
        return self.ending

    def has_digest(self, window: int) -> bool:
        """Return whether a node's report of ``window`` has a digest: at intervals, and before each checkpoint."""
        intervals = self._hparams.digest_interval_windows, self._hparams.checkpoint_frequency
        return any((window + 1 - self.start_window) % interval == 0 for interval in intervals)

    def report(self, gathered: GatherResult[Update], *, uid: int, block_hash: str) -> DebugReport:
        """Build the report of node ``uid`` after it applied ``gathered``; ``block_hash``: of the next window."""
        window, whole = gathered.window, self.has_digest(gathered.window)
        seed = fingerprint_seed(window=window, block_hash=block_hash)
        return DebugReport(
            window=window,
            uid=uid,
            fingerprint=self.fingerprint(seed),
            outer_fingerprint=self.outer_fingerprint(seed, whole),
            proof=self.fingerprint(proof_seed(uid=uid, window=window, block_hash=block_hash)),
            digest=self.digest() if whole else "",
            included={str(one.uid): one.sha256 for one in gathered.updates},
            skipped={str(uid): reason for uid, reason in gathered.skipped.items()},
        )

    def memory_by_kind(self) -> dict[str, int | None]:
        """Return the bytes of this rank's tensors, by kind; on a GPU also the peak since the last call, else None.

        Gradients and activations exist only during training; activations are the difference between peak and the rest.
        """
        outer, local = (half.state_dict(copies=False)["tensors"] for half in (self.outer, self.local))
        kinds: dict[str, int | None] = {
            "weights": _bytes(self.parameters),
            "gradients": _bytes(self.parameters),
            "moments": _bytes(local),
            "error_feedback": _bytes({name: one for name, one in outer.items() if not name.startswith(SHARED)}),
            "outer_momentum": _bytes({name: one for name, one in outer.items() if name.startswith(MOMENTUM)}),
        }
        device = self.model.device
        if device.type != "cuda":
            return kinds | {"activations": None, "peak": None}
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        kept = {**local, **outer}
        resident = _bytes(self.parameters) * 2 + _bytes({name: one for name, one in kept.items() if one.is_cuda})
        return kinds | {"activations": max(0, peak - resident), "peak": peak}

    # Disk

    def stateful_values(self) -> dict[str, Any]:
        """Return the current values of ``stateful``, to be passed to ``save``."""
        return {name: one.state_dict() for name, one in self.stateful.items()}

    @command
    def save(self, window: int, stateful: Mapping[str, Any]) -> SavedState:
        """Write a snapshot; no tensor may change during the call. Raises StateError; older snapshots are kept."""
        draft = self._begin_save(window, stateful, {})
        draft.write()
        return self.snapshots.finish(draft, self._parallel)

    @command
    def begin_save(self, window: int, stateful: Mapping[str, Any]) -> None:
        """Begin to write a snapshot of the present state, in a thread of each rank; ``end_save`` ends it.

        Training may continue until then, because weights and moments are copied first. No update may be packed,
        restored or applied.
        """
        self._kept = kept_weights(self.model, self._settings)
        moments = self.local.state_dict(copies=False)["tensors"]
        copies = {"model": self._kept, "local": {name: host_copy(local_rows(one)[0]) for name, one in moments.items()}}
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()  # another thread reads the copies
        draft = self._begin_save(window, stateful, copies)
        self._saving = draft, threading.Thread(target=draft.write, name="save")
        self._saving[1].start()

    def wait_written(self) -> None:
        """Wait until this rank's part of the snapshot is on disk."""
        if self._saving:
            self._saving[1].join()

    @command
    def end_save(self) -> SavedState:
        """Finish and return the snapshot that ``begin_save`` began. Raises StateError; older snapshots are kept."""
        assert self._saving is not None
        (draft, thread), self._saving = self._saving, None
        thread.join()
        return self.snapshots.finish(draft, self._parallel)

    def _begin_save(
        self, window: int, stateful: Mapping[str, Any], copies: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> SnapshotDraft:
        outer, local = self.outer.state_dict(copies=False), self.local.state_dict(copies=False)
        unshared = {name: one for name, one in outer["tensors"].items() if not name.startswith(SHARED)}
        groups = {
            # Other nodes fetch only the first two groups of a checkpoint: each group has its own shards.
            "model": self.parameters,
            "outer": {name: one for name, one in outer["tensors"].items() if name.startswith(SHARED)},
            "own": unshared,
            "local": local["tensors"],
        }
        values = {
            "run": self.run,
            "outer": {key: value for key, value in outer.items() if key != "tensors"},
            "local": {key: value for key, value in local.items() if key != "tensors"},
            PARTS: dict(stateful),
        }
        return self.snapshots.begin(
            window=window,
            start_window=self.start_window,
            global_step=self.global_step,
            version=version_at(self._hparams.version, window),
            groups=groups,
            values=values,
            copies=copies,
            parallel=self._parallel,
        )

    def saved(self, *, until: int | None = None, clean: bool = True) -> SavedState | None:
        """Find the newest complete snapshot of this run; arguments as ``StateFolder.load``."""
        return self.snapshots.load(run=self.run, until=until, clean=clean)

    def restore(self, saved: SavedState) -> None:
        """Load everything of a snapshot. Raises StateError."""
        self._restore(saved.folder)
        for name, one in self.stateful.items():
            one.load_state_dict(saved.values[PARTS][name])

    @command
    def _restore(self, folder: Path) -> None:
        saved, others = self._opened(folder), self.outer.others
        with together(self._parallel):
            outer = {**saved.tensors("own", others), **saved.tensors("outer", others)}
        self.outer.load_state_dict({**saved.values["outer"], "tensors": outer})
        local = saved.lazily("local", self.local.layout)
        self.local.load_state_dict({**saved.values["local"], "tensors": local})
        self._restore_model(saved)

    def restore_shared(self, saved: SavedState) -> None:
        """Load the tensors that are equal on all nodes; this node's own tensors and values stay. Raises StateError."""
        self._restore_shared(saved.folder)

    @command
    def _restore_shared(self, folder: Path) -> None:
        saved = self._opened(folder)
        with together(self._parallel):
            shared = saved.tensors("outer", self.outer.others)
        self.outer.load_shared(shared)
        self._restore_model(saved)

    def restore_first_weights(self, saved: SavedState) -> None:
        """Start a run with the weights of another version's snapshot. Raises StateError."""
        self._restore_first_weights(saved.folder)

    @command
    def _restore_first_weights(self, folder: Path) -> None:
        self._restore_model(self._opened(folder))
        self.outer.reset_shared()
        self.global_step = 0

    @command
    def reset_to_first_weights(self) -> None:
        """Reset to the run's first weights; this node's own tensors and values are kept."""
        self._kept = self._own = None
        self.loads += 1
        set_first_weights(self.parameters, self._hparams)
        self.outer.reset_shared()
        self.global_step = 0

    def _opened(self, folder: Path) -> SavedState:
        """Open the snapshot in a folder on each rank."""
        with together(self._parallel):
            manifest = read_manifest(folder)
        return SavedState(folder, manifest)

    @torch.no_grad()
    def _restore_model(self, saved: SavedState) -> None:
        self._kept = self._own = None
        self.loads += 1
        with together(self._parallel):
            saved.read_into("model", {name: parameter.detach() for name, parameter in self.parameters.items()})
        self.global_step = saved.manifest.global_step


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(local_rows(one.detach())[0].nbytes for one in tensors.values())

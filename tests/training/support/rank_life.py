"""The work of ranks in tests: a node's training state from its first weights to its snapshot, on one or more ranks."""

import datetime
import gc
import hashlib
import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401 - takes seconds: once, before the forks

from tplr.compress.payload import Update, parse
from tplr.errors import StateError, TrainingError
from tplr.hparams import HParams, load_hparams
from tplr.node.train_state import TrainState
from tplr.training import alignment
from tplr.training.commands import Commands, command
from tplr.training.device import DEFAULTS, DeviceSettings
from tplr.training.model import build_model
from tplr.training.parallel import SINGLE_PROCESS, local_rows
from tplr.training.schemes import outer_scheme
from tplr.training.sharded import joined_process_group

torch.set_num_threads(1)
SENDERS = 3
# Names of the collectives that FSDP calls in PyTorch 2.13, and before.
FSDP_GATHER, FSDP_REDUCE = (
    ("all_gather_single", "all_gather_into_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
)
META = {"pages_digest": "0" * 64, "batches": 1}


class Watched(TrainState):
    """A training state with shards that tests can set and read."""

    @command
    def take_work(self, seed: int) -> None:
        """Set random work, as if it had been trained."""
        self._work = {}
        for name, whole in random_tensors(self.parameters, seed).items():
            self._work[name] = torch.empty_like(self.parameters[name].detach())
            part, rows = local_rows(self._work[name])
            part.copy_(whole[rows])

    @command
    def work(self) -> bytes:
        """Return the work of the last training as one vector of float32, in the order of names."""
        return b"".join(self._whole(self._work[name]).numpy().tobytes() for name in sorted(self._work))

    @command
    def own_digest(self) -> str:
        """Return a hash of all saved tensors (error feedback, momentum, moments) and of the buffers' windows."""
        outer, local = self.outer.state_dict(copies=False), self.local.state_dict(copies=False)
        found = {}
        for part, state in (("outer", outer), ("local", local)):
            for name, tensor in sorted(state["tensors"].items()):
                data = self._whole(tensor) if isinstance(tensor, DTensor) else tensor
                found[f"{part}.{name}"] = hashlib.sha256(data.numpy().tobytes()).hexdigest()
        every: dict[str, str] = {}
        for one in self._parallel.gather_bytes(json.dumps(found).encode()):
            every = json.loads(one) | every  # of a sharded tensor rank 0 has seen the whole
        rest = [{key: value for key, value in state.items() if key != "tensors"} for state in (outer, local)]
        return hashlib.sha256(json.dumps([sorted(every.items()), rest]).encode()).hexdigest()

    @command
    def persistent_bytes(self) -> list[int]:
        """Return the bytes of all live tensors, by rank."""
        gc.collect()
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        alive = {
            part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
            for part in (local_rows(one.detach())[0] for one in tensors if not one.is_meta)
        }
        return [int(one) for one in self._parallel.gather_bytes(str(sum(alive.values())).encode())]

    @command
    def spoil(self, rank: int) -> None:
        """Set one entry of this rank's work to a value that is not finite."""
        if self._parallel.rank == rank:
            part, _ = local_rows(self._work["lm_head.weight"])
            part[0, 0] = torch.nan

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = self._parallel.gather([tensor, *[None] * (self._parallel.size - 1)])
        return torch.empty(0) if whole is None else whole


@contextmanager
def joined(
    hparams: HParams, folder: Path, *, timeout: float = 60.0, settings: DeviceSettings = DEFAULTS
) -> Iterator[Watched | None]:
    """On rank 0 the training state; the other ranks serve it and get None."""
    if "RANK" not in os.environ:
        yield Watched(build_model(hparams, settings=settings), hparams, folder, settings)
        return
    logging.basicConfig(level=logging.INFO)
    limit = datetime.timedelta(seconds=timeout)
    with joined_process_group(torch.device("cpu"), limit, restart=_restart_count()) as parallel:
        commands = Commands(parallel, limit)
        state = Watched(build_model(hparams, "cpu", parallel, settings), hparams, folder, settings, commands)
        if parallel.rank != 0:
            commands.serve(state)
            yield None
            return
        try:
            yield state
        finally:
            commands.end()


def random_tensors(parameters: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {name: 0.01 * torch.randn(parameters[name].shape, generator=chance) for name in sorted(parameters)}


def updates_of(state: TrainState, hparams: HParams, window: int) -> list[Update]:
    """Return updates that are equal for every number of ranks, from senders without error feedback."""
    plain = {name: torch.zeros(one.shape) for name, one in state.parameters.items()}
    found = []
    for uid in range(SENDERS):
        sender = outer_scheme(plain, hparams)
        work = random_tensors(plain, 1000 * window + uid)
        body = sender.pack(work, step=window, window=window, uid=uid, **META)
        found.append(parse(body, state.spec, window=window, uid=uid))
    return found


def batches_of(hparams: HParams, seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, hparams.model.vocab_size, (count, 2, 12))


def life(hparams: str, folder: str, windows: int) -> dict[str, Any]:
    """Run every command in order; rank 0 returns their results."""
    constants = load_hparams(hparams)
    with joined(constants, Path(folder)) as state:
        return {} if state is None else _life(state, constants, windows)


def aligned(hparams: str, folder: str) -> dict[str, Any]:
    """Inner products with gradients on held-out and on assigned pages."""
    constants = load_hparams(hparams)
    with joined(constants, Path(folder)) as state:
        if state is None:
            return {}
        before, updates = state.digest(), updates_of(state, constants, 0)
        held_out, found = state.align(updates, batches_of(constants, 77, 5), 3)
        own = state.own_alignment(updates, batches_of(constants, 78, 4), 3)
        none = state.align([], batches_of(constants, 77, 3), 3)[1]
        middle = state.middle_alignment(updates, updates, batches_of(constants, 77, 5), 3).products_in(found.unit)
        assert middle != found.products
        assert state.digest() == before
        assert none[:4] == ((), (), (), ())
        return {"losses": held_out.losses.tolist(), "own": own, "middle": middle} | found._asdict()


def align_ended(hparams: str, folder: str) -> dict[str, Any]:
    """The node is about to end while an alignment computes its gradient. Each rank counts its aligned tensors."""
    constants, real, tensors = load_hparams(hparams), alignment._of_tensor, 0

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal tensors
        tensors += 1
        return real(*args, **kwargs)

    alignment._of_tensor = count
    with joined(constants, Path(folder)) as state:
        if state is None:
            return {"tensors": tensors}
        state.model.get_input_embeddings().register_forward_pre_hook(lambda *_: setattr(state, "ending", True))
        before, updates = state.digest(), updates_of(state, constants, 0)
        try:
            state.align(updates, batches_of(constants, 77, 1), 3)
        except TrainingError as error:
            assert state.digest() == before  # the ranks still execute commands together
            return {"error": str(error), "tensors": tensors}
        return {"error": "", "tensors": tensors}


def _life(state: Watched, hparams: HParams, windows: int) -> dict[str, Any]:
    state.start_window = 0
    found: dict[str, Any] = {"first": state.digest(), "digests": [], "bodies": [], "losses": [], "work": []}
    held_out = state.baseline(batches_of(hparams, 77, 3))
    found["held_out"] = held_out.losses.tolist()
    for window in range(windows):
        updates = updates_of(state, hparams, window)
        state.set_caps(updates)
        if window < 3:
            before = state.digest()
            measured = state.evaluate(updates[0], batches_of(hparams, window, 3), held_out)
            found["losses"].append([measured.assigned.before, measured.assigned.after, measured.held_out.after])
            stats = state.train(batches_of(hparams, 50 + window, 5), window)
            assert (stats.batches, stats.skipped) == (5, 0)
            found["losses"].append([stats.losses])
            found["work"].append(np.frombuffer(state.work(), "<f4").astype(float).tolist())
            assert state.digest() == before
        state.take_work(window)
        body = state.pack(window=window, uid=9, **META)
        found["bodies"].append(hashlib.sha256(body).hexdigest())
        if window == 2:
            state.restore_update(body, window=window, uid=9)
        state.apply(updates)
        state.own_applied(window)
        hashes = [state.digest(), state.fingerprint(window), state.outer_fingerprint(window)]
        found["digests"].append([*hashes, state.global_step])
    try:
        state.take_work(5)
        state.spoil(SINGLE_PROCESS.size * (int(os.environ.get("WORLD_SIZE", "1")) - 1))
        state.pack(window=windows, uid=9, **META)
    except TrainingError as error:
        found["spoilt"] = str(error)
    found["saved"] = state.save(windows, {"part": [1]}).manifest.model_dump(mode="json", exclude={"shards", "seal"})
    found["own"] = state.own_digest()
    return found


def overlapped(hparams: str, folder: str) -> dict[str, Any]:
    """Run a training that a window interrupts, with a save while it continues."""
    constants = load_hparams(hparams)
    with joined(constants, Path(folder)) as state:
        if state is None:
            return {}
        state.start_window = 0
        state.train(batches_of(constants, 50, 6), 0)
        state.pack(window=0, uid=9, **META)
        before, asked = state.digest(), iter([False])
        stats = state.train(batches_of(constants, 51, 6), 1, pause=lambda: next(asked, True))
        assert (stats.paused, stats.batches) == (True, 3)
        assert state.digest() == before
        state.apply(updates_of(state, constants, 0), 0)
        applied, own = state.digest(), state.own_digest()
        assert applied != before
        state.begin_save(1, {"part": [1]})
        stats = state.continue_training()
        assert (stats.paused, stats.batches) == (False, 6)
        assert state.digest() == applied
        assert state.own_digest() != own  # the moments have moved
        work = np.frombuffer(state.work(), "<f4").astype(float).tolist()
        state.wait_written()
        saved = state.end_save()
        assert saved.values["parts"] == {"part": [1]}
        state.reset_to_first_weights()
        state.restore(saved)
        assert (state.digest(), state.own_digest(), state.global_step) == (applied, own, 1)
        return {"applied": applied, "work": work}


def restored(hparams: str, folder: str) -> dict[str, Any]:
    """Restore the newest snapshot, and the same after a new save; then a checkpoint, and the first weights again."""
    constants = load_hparams(hparams)
    with joined(constants, Path(folder)) as state:
        if state is None:
            return {}
        state.start_window = 0
        first = state.digest()
        saved = state.saved()
        assert saved is not None
        state.restore(saved)
        found = {"digest": state.digest(), "own": state.own_digest(), "step": state.global_step, "window": saved.window}
        state.save(saved.window + 1, {})
        state.train(batches_of(constants, 5, 4), 0)
        state.reset_to_first_weights()
        assert state.digest() == first
        state.restore_shared(saved)
        assert state.digest() == found["digest"]
        return found


def unreadable(hparams: str, folder: str) -> dict[str, Any]:
    """Read a snapshot with one unreadable file, for each file that only the last rank needs."""
    constants = load_hparams(hparams)
    with joined(constants, Path(folder), timeout=20.0) as state:
        if state is None:
            return {}
        state.start_window = 0
        state.train(batches_of(constants, 5, 4), 0)
        state.pack(window=0, uid=9, **META)
        state.apply(updates_of(state, constants, 0))
        saved, before, refused = state.save(1, {}), state.digest(), []
        last = f"shard-{int(os.environ['WORLD_SIZE']) - 1:05d}"
        for group, restore in (("own", state.restore), ("outer", state.restore_shared)):
            names = [one.name for one in saved.manifest.shards if one.pieces[0].tensor.startswith(f"{group}.")]
            path = saved.folder / next(name for name in names if name.startswith(last))
            path.rename(saved.folder / "away")
            try:
                restore(saved)
            except StateError as error:
                refused.append(str(error))
            (saved.folder / "away").rename(path)
        assert state.digest() == before
        return {"refused": refused}


def persistent(hparams: str, folder: str) -> dict[str, Any]:
    """Return the bytes by rank, after a window of a miner with outer momentum."""
    constants = load_hparams(hparams)
    with joined(constants, Path(folder)) as state:
        if state is None:
            return {}
        state.train(batches_of(constants, 5, 4), 0)
        state.pack(window=0, uid=9, **META)
        return {"bytes": state.persistent_bytes(), "sizes": [4 * one.numel() for one in state.parameters.values()]}


def worked(hparams: str, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a window's work by name, the bytes that were gathered for it, and a validator's measurements."""
    import torch.distributed as dist

    constants, gathered = load_hparams(hparams), 0
    gather = next(name for name in FSDP_GATHER if hasattr(dist, name))
    real = getattr(dist, gather)

    def count(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal gathered
        gathered += output.nbytes
        return real(output, *args, **kwargs)

    with joined(constants, Path(folder), settings=DeviceSettings(**settings), timeout=300.0) as state:
        setattr(dist, gather, count)
        if state is None:
            return {}
        state.train(batches_of(constants, 5, 4), 0)
        bytes_gathered, work, sizes = gathered, np.frombuffer(state.work(), "<f4"), state.parameters
        parts = np.split(work, np.cumsum([sizes[name].numel() for name in sorted(sizes)])[:-1])
        held_out, update = state.baseline(batches_of(constants, 77, 3)), updates_of(state, constants, 0)[0]
        return {
            "work": {name: part.astype(float).tolist() for name, part in zip(sorted(sizes), parts, strict=True)},
            "gathered": bytes_gathered,
            "measured": state.evaluate(update, batches_of(constants, 1, 3), held_out).model_dump(),
        }


def uneven(rows: list[int]) -> dict[str, Any]:
    """Send tensors of few rows to each rank, one after the other, and back; every rank sees the values of all ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    with joined_process_group(torch.device("cpu"), datetime.timedelta(seconds=60)) as parallel:
        for count in rows:
            for owner in range(parallel.size):
                whole = torch.arange(3.0 * count).view(count, 3)
                shard = distribute_tensor(whole, parallel._mesh, [Shard(0)], src_data_rank=None)
                given = [shard if rank in (owner, 0) else None for rank in range(parallel.size)]
                found = parallel.gather(given)
                assert (found is not None) == (parallel.rank in (owner, 0))
                assert found is None or torch.equal(found, whole)
                given = [shard if rank == owner else None for rank in range(parallel.size)]
                parallel.scatter(whole + 1 if parallel.rank == owner else None, given)
                part, own = local_rows(shard)
                assert torch.equal(part, whole[own] + 1)
        assert parallel.gather_bytes(b"x" * parallel.rank) == [b"x" * rank for rank in range(parallel.size)]
        assert parallel.any(parallel.rank == 1)
        assert not parallel.any(False)
        return {"sum": parallel.sum(0.25)}


def walk(hparams: str, folder: str, timeout: float, fault: tuple[str, int, str] | None = None) -> dict[str, Any]:
    """Run every command in order; return the digest of each saved window.

    Args:
        fault: a command, the rank that fails in the middle of it, and how.
    """
    constants = load_hparams(hparams)
    real = Commands._execute

    def execute(self: Commands, method: Any, target: Any, args: Any, kwargs: Any) -> Any:
        first_save = method.__name__ == "save" and args[0] == 0
        if fault and (method.__name__, self.parallel.rank) == tuple(fault[:2]) and not first_save:
            _break_next_collective(fault[2])
        return real(self, method, target, args, kwargs)

    Commands._execute = execute
    with joined(constants, Path(folder), timeout=timeout) as state:
        if state is None:
            return {}
        state.start_window = 0
        digests = {"0": state.digest() if fault is None else ""}
        state.save(0, {})
        held_out = state.baseline(batches_of(constants, 77, 3))
        updates = updates_of(state, constants, 0)
        state.set_caps(updates)
        state.align(updates, batches_of(constants, 78, 2), 5)
        state.middle_alignment(updates, updates, batches_of(constants, 78, 1), 5)
        state.own_alignment(updates, batches_of(constants, 79, 2), 5)
        state.evaluate(updates[0], batches_of(constants, 1, 3), held_out)
        asked = iter([False])
        assert state.train(batches_of(constants, 50, 5), 0, pause=lambda: next(asked, True)).paused
        state.continue_training()
        body = state.pack(window=0, uid=9, **META)
        state.restore_update(body, window=0, uid=9)
        state.apply(updates)
        state.own_applied(0)
        state.fingerprint(1)
        state.outer_fingerprint(1)
        digests["1"] = digests["2"] = state.digest()
        state.save(1, {})
        state.begin_save(2, {})
        state.wait_written()
        saved = state.end_save()
        state.restore(saved)
        state.restore_shared(saved)
        state.restore_first_weights(saved)
        state.reset_to_first_weights()
        return digests


def _break_next_collective(how: str) -> None:
    """Make the rank fail when the command first needs the others, or at its end."""
    import torch.distributed as dist

    def broken(*_: Any, **__: Any) -> Any:
        if how == "raises":
            raise ValueError("scripted")
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)

    for name in ("all_reduce", "all_gather", "all_to_all_single", *FSDP_GATHER, *FSDP_REDUCE):
        setattr(dist, name, broken)


def newest(hparams: str, folder: str) -> dict[str, Any]:
    """Return what a restart finds: the newest snapshot's window and model."""
    constants = load_hparams(hparams)
    with joined(constants, Path(folder)) as state:
        if state is None:
            return {}
        state.start_window = 0
        saved = state.saved()
        if saved is None:
            return {"window": None, "digest": state.digest()}
        try:
            state.restore(saved)
        except StateError as error:
            return {"error": str(error)}
        return {"window": saved.window, "digest": state.digest()}


def restarted(hparams: str, folder: str, windows: int, dies_in: int) -> dict[str, Any]:
    """Run windows from the newest snapshot on; in the first life the last rank dies while it trains in one of them."""
    constants, life = load_hparams(hparams), _restart_count()
    real = Commands._execute

    def execute(self: Commands, method: Any, target: Any, args: Any, kwargs: Any) -> Any:
        last = self.parallel.rank == self.parallel.size - 1
        if last and life == "0" and method.__name__ == "_train" and target.global_step == dies_in:
            _break_next_collective("dies")
        return real(self, method, target, args, kwargs)

    Commands._execute = execute
    with joined(constants, Path(folder)) as state:
        if state is None:
            return {}
        state.start_window = first = 0
        if saved := state.saved():
            state.restore(saved)
            first = saved.window
        for window in range(first, windows):
            state.train(batches_of(constants, 50 + window, 5), window)
            state.pack(window=window, uid=9, **META)
            state.apply(updates_of(state, constants, window))
            state.save(window + 1, {})
        return {"life": int(life), "first": first, "digest": state.digest()}


def _restart_count() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def torchrun_rank(function: str, call: str, result: str) -> None:
    """Run a rank of torchrun: ``call`` has the arguments as JSON, and rank 0 writes the result."""
    found = globals()[function](**json.loads(call))
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(found))

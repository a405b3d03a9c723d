"""One miner's training on several devices: PyTorch's FSDP2 over the ranks of ``torchrun``.

Rank 0 is the node: it alone has the clock, the buckets, the whole weights, the error feedback and the inner optimizer's
moments. The other ranks keep nothing from window to window. For each one they get its batches, the weights and the
moments from rank 0, train on their share with shards of all of it, and give back what came of it.

**No rank waits for one that has failed.** Every collective, those inside FSDP too, begins with a status word that all
ranks reduce over the CPU; so does the end of a window. What a rank alone can fail at comes before the word. A rank that
fails reduces ``FAILED`` once instead of what was due, and leaves; the others see it at the same point, and leave too.
The window is lost, and the next one begins with new shards. A rank that dies closes its connections, which ends the
reduction with an error, and the process with it: ``torchrun`` restarts all.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, distribute_tensor

from tplr.errors import TrainingError
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.training.layers import decoder_layers
from tplr.training.local import LocalTraining, LocalWork, Stop, never
from tplr.training.model import build_model
from tplr.training.parallel import ParallelContext
from tplr.training.schemes import local_training

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OK, FLAG, FAILED = 0, 1, 2
# Between windows, the others wait for rank 0 as long as the chain or a bucket makes it wait.
PATIENCE = datetime.timedelta(days=7)
END = -1  # a step that says: there is no next window


class RankFailed(TrainingError):
    """A rank said so; all others raise this at the same point."""


class ProcessGroupContext:
    """See ``ParallelContext``; the process group is the default one, which must be there.

    Args:
        device: of this rank's shards.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device
        self._status_group: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._mesh = init_device_mesh(device.type, (self.size,))
        self._failed = False  # a rank failed in this window: no more collectives until the next one

    def any(self, flag: bool) -> bool:
        """See ``ParallelContext``."""
        word = torch.tensor(FLAG if flag else OK)
        dist.all_reduce(word, dist.ReduceOp.MAX, group=self._status_group)
        if word == FAILED:
            self._failed = True
            raise RankFailed("another rank of this miner failed in this window; its own log says why")
        return bool(word == FLAG)

    def fail(self) -> None:
        """Tell the others, who raise ``RankFailed`` at their next collective; unless one of them has said so first."""
        if not self._failed:
            self._failed = True
            dist.all_reduce(torch.tensor(FAILED), dist.ReduceOp.MAX, group=self._status_group)

    def sum(self, number: float) -> float:
        """See ``ParallelContext``."""
        summed = torch.tensor(number, dtype=torch.float64)
        self.any(False)
        dist.all_reduce(summed, group=self._status_group)
        return summed.item()

    def full_tensor(self, part: torch.Tensor) -> torch.Tensor:
        """See ``ParallelContext``; on other ranks than 0 an empty tensor, as nobody needs it there."""
        assert isinstance(part, DTensor)
        self.any(False)
        whole = part.full_tensor()
        return whole if self.rank == 0 else whole.new_empty(0)

    def distribute(self, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """See ``ParallelContext``."""
        assert isinstance(like, DTensor)
        full = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        if self.rank == 0:
            assert whole is not None
            full.copy_(whole)
        self.any(False)
        dist.broadcast(full, src=0)
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)

    def to_local(self, part: torch.Tensor) -> torch.Tensor:
        """See ``ParallelContext``."""
        return part.to_local() if isinstance(part, DTensor) else part

    def shard(self, model: PreTrainedModel) -> PreTrainedModel:
        """Make a model's parameters shards on this rank's device, layer by layer."""
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_GuardedAllGather(self))
                module.set_custom_reduce_scatter(_GuardedReduceScatter(self))
        return model

    def send_task(self, step: int, batches: np.ndarray) -> None:
        """Rank 0 to the others: train the window ``step`` of the run on these batches, or ``END``."""
        self._failed = False
        header = torch.tensor([step, *batches.shape])
        dist.broadcast(header, src=0, group=self._status_group)
        if step != END:
            dist.broadcast(
                torch.from_numpy(np.ascontiguousarray(batches, dtype=np.int64)), src=0, group=self._status_group
            )

    def receive_task(self) -> tuple[int, np.ndarray]:
        """What rank 0 sends."""
        self._failed = False
        header = torch.empty(4, dtype=torch.int64)
        dist.broadcast(header, src=0, group=self._status_group)
        step, *shape = header.tolist()
        batches = torch.empty(shape, dtype=torch.int64)
        if step != END:
            dist.broadcast(batches, src=0, group=self._status_group)
        return step, batches.numpy()


class _GuardedAllGather(DefaultAllGather):
    """FSDP's own, once all ranks have said that they are there."""

    def __init__(self, ranks: ProcessGroupContext) -> None:
        self._ranks = ranks

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self._ranks.any(False)
        return super().__call__(*args, **kwargs)


class _GuardedReduceScatter(DefaultReduceScatter):
    """FSDP's own, once all ranks have said that they are there."""

    def __init__(self, ranks: ProcessGroupContext) -> None:
        self._ranks = ranks

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work:
        self._ranks.any(False)
        return super().__call__(*args, **kwargs)


class ShardedTraining:
    """Rank 0's ``LocalTraining``: what ``local`` would do alone, done by all ranks.

    The tensors differ from those of one process by float32's rounding, as sums are made in another order. Sums over a
    round of ``size`` batches are one unit: if a loss in it is not finite, all of the round is left out.
    """

    def __init__(self, local: LocalTraining, hparams: HParams, ranks: ProcessGroupContext) -> None:
        self.moves = local.moves
        self.parallel: ParallelContext = ranks
        local.parallel = ranks
        self._local = local
        self._shards = _Shards(hparams, ranks)
        self._ranks = ranks

    def run(self, model: PreTrainedModel, batches: np.ndarray, *, step: int, stop: Stop = never) -> LocalWork:
        """See ``LocalTraining``; ``model`` has the whole weights."""
        self._ranks.send_task(step, batches)
        with self._shards.of(model) as shards:
            return self._local.run(shards, batches, step=step, stop=stop)

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """That of ``local``: rank 0 keeps it whole."""
        return self._local.state_dict(copies=copies)

    def load_state_dict(self, state: Any) -> None:
        """See ``LocalTraining``."""
        self._local.load_state_dict(state)


def serve(ranks: ProcessGroupContext, hparams: HParams) -> None:
    """What the other ranks do: train as rank 0 says, until it says ``END``."""
    shards = _Shards(hparams, ranks)
    while True:
        step, batches = ranks.receive_task()
        if step == END:
            return
        with suppress(TrainingError), shards.of(None) as model:
            # Rank 0 keeps what one window leaves for the next, and sends it along.
            local = local_training(dict(model.named_parameters()), hparams)
            local.parallel = ranks
            local.run(model, batches, step=step)


class _Shards:
    """A sharded model, made on demand and again after a failure: FSDP does not recover in mid-pass."""

    def __init__(self, hparams: HParams, ranks: ProcessGroupContext) -> None:
        self._hparams = hparams
        self._ranks = ranks
        self._model: PreTrainedModel | None = None

    @contextmanager
    def of(self, whole: PreTrainedModel | None) -> Iterator[PreTrainedModel]:
        """Shards with rank 0's weights. Any error in the context becomes a ``TrainingError`` on all ranks."""
        try:
            model = self._model = self._model or self._ranks.shard(build_model(self._hparams))
            weights = dict(whole.named_parameters()) if whole is not None else {}
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(self._ranks.distribute(weights.get(name), parameter.detach()))
            yield model
            self._ranks.any(False)  # a rank that fails after its last collective is heard here
        except RankFailed:
            self._model = None
            raise
        except Exception as error:
            self._model = None
            logger.exception("rank %d failed in training: the window is lost", self._ranks.rank)
            self._ranks.fail()
            raise TrainingError(f"rank {self._ranks.rank}: {error}") from error


@contextmanager
def joined_process_group(device: torch.device) -> Iterator[ProcessGroupContext]:
    """Within the context, the process group of ``torchrun``; rank 0 ends the others' service when it leaves."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        ranks = ProcessGroupContext(device)
        try:
            yield ranks
        finally:
            if ranks.rank == 0:
                with suppress(RuntimeError):  # the others are gone already
                    ranks.send_task(END, np.empty((0, 0, 0), np.int64))
    finally:
        dist.destroy_process_group()

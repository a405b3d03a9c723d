"""A program's checkpoint over HTTP: training resumes from it exactly."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from signers import signer
from torch import nn
from torch.optim import lr_scheduler

from tplr.errors import StateError
from tplr.exchange import checkpoints
from tplr.exchange.checkpoints import Checkpoint
from tplr.exchange.model_checkpoints import (
    LoadedCheckpoint,
    model_tensors,
    read_checkpoint,
    wanted_tensors,
    write_checkpoint,
)
from tplr.exchange.snapshot import read_manifest, remove_snapshot

ME = signer(3)
Optimizer, Scheduler = torch.optim.Optimizer, lr_scheduler.LRScheduler


class Model(nn.Module):
    """With a tied weight, a buffer, and a parameter of another type."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(tokens))) * self.scale


def lambda_lr(optimizer: Optimizer) -> Scheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def sequential(optimizer: Optimizer) -> Scheduler:
    first = lr_scheduler.LinearLR(optimizer, total_iters=3)
    second = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [3])


def multi_step(optimizer: Optimizer) -> Scheduler:
    return lr_scheduler.MultiStepLR(optimizer, [2, 4, 6])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


def train(model: Model, optimizer: Optimizer, scheduler: Scheduler, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(11, (6,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        optimizer.step()
        scheduler.step()


async def publish(served: Any, folder: Path, *args: Any, window: int = 9, replace: bool = False) -> Checkpoint:
    write_checkpoint(folder, *args, window=window, start_window=4, global_step=5, version="1")
    await checkpoints.publish(served.store, folder, signer=ME, keep_last=2, replace=replace)
    remove_snapshot(folder)
    return Checkpoint(served.store, window, ME)


async def load(
    checkpoint: Checkpoint, folder: Path, model: nn.Module, holders: dict[str, Any]
) -> dict[str, torch.Tensor]:
    whole = await checkpoints.fetch_manifest(checkpoint)
    wanted = wanted_tensors(whole, model, holders)
    return read_checkpoint(
        folder, await checkpoints.fetch(checkpoint, folder, wanted=wanted, manifest=whole), model, holders
    )


@pytest.mark.parametrize("make_scheduler", [lambda_lr, sequential, multi_step])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
async def test_training_continues_exactly(
    served: Any, tmp_path: Path, optimizer_name: str, make_scheduler: Callable[[Optimizer], Scheduler]
) -> None:
    torch.manual_seed(3)
    model = Model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = make_scheduler(optimizer)
    train(model, optimizer, scheduler, 5, seed=1)
    momentum = {"table.weight": torch.randn(11, 8)}
    holders = {"optimizer": optimizer, "scheduler": scheduler}
    checkpoint = await publish(served, tmp_path / "out", model, holders, momentum)
    saved_optimizer, saved_scheduler = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(scheduler.state_dict())
    train(model, optimizer, scheduler, 4, seed=2)

    torch.manual_seed(4)
    other = Model()
    other_optimizer = OPTIMIZERS[optimizer_name](other.parameters())
    other_scheduler = make_scheduler(other_optimizer)
    holders = {"optimizer": other_optimizer, "scheduler": other_scheduler}
    found = await load(checkpoint, tmp_path / "in", other, holders)
    assert torch.equal(found["table.weight"], momentum["table.weight"])
    assert other_scheduler.state_dict() == saved_scheduler
    assert other_optimizer.state_dict()["param_groups"] == saved_optimizer["param_groups"]
    assert other.head.weight is other.table.weight
    train(other, other_optimizer, other_scheduler, 4, seed=2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


async def test_a_model_alone_fetches_no_other_state(served: Any, tmp_path: Path) -> None:
    model = Model(64)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, lambda_lr(optimizer), 1, seed=1)
    checkpoint = await publish(served, tmp_path / "out", model, {"optimizer": optimizer}, {})
    other = Model(64)
    served.requests.clear()
    assert await load(checkpoint, tmp_path / "in", other, {"optimizer": None, "scheduler": None}) == {}
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in model.state_dict().items())
    assert len(served.seen("GET", "shard-")) == 1


async def test_another_optimizer_or_model_is_refused_and_nothing_changes(served: Any, tmp_path: Path) -> None:
    model = Model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, lambda_lr(optimizer), 1, seed=1)
    checkpoint = await publish(served, tmp_path / "out", model, {"optimizer": optimizer}, {})
    other = Model()
    before = copy.deepcopy(other.state_dict())
    fewer = torch.optim.SGD([other.table.weight], lr=0.1)
    with pytest.raises(StateError, match="the checkpoint's optimizer does not fit this one"):
        await load(checkpoint, tmp_path / "a", other, {"optimizer": fewer})
    with pytest.raises(StateError, match="has no scheduler state: load it without one"):
        await load(checkpoint, tmp_path / "b", other, {"scheduler": lambda_lr(fewer)})
    with pytest.raises(StateError, match=r"model\.table\.weight is .*expected"):
        await load(checkpoint, tmp_path / "c", Model(16), {})
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in before.items())


async def test_states_that_a_model_does_not_explain_are_not_fetched(served: Any, tmp_path: Path) -> None:
    model = Model()
    checkpoint = await publish(served, tmp_path / "out", model, {}, {"table.weight": torch.zeros(2**19)})
    served.requests.clear()
    with pytest.raises(StateError, match=r"states of 2097152 bytes beside the model: at most \d+ are expected"):
        await load(checkpoint, tmp_path / "in", model, {})
    assert served.seen("GET", "shard-") == []


async def test_a_checkpoint_takes_the_place_of_another_of_its_window(served: Any, tmp_path: Path) -> None:
    first, second = Model(), Model()
    await publish(served, tmp_path / "out", first, {}, {})
    await publish(served, tmp_path / "out", second, {}, {}, replace=False)
    found = Model()
    checkpoint = Checkpoint(served.store, 9, ME)
    await load(checkpoint, tmp_path / "a", found, {})
    assert torch.equal(found.table.weight, first.table.weight)
    await publish(served, tmp_path / "out", second, {}, {}, replace=True)
    await load(checkpoint, tmp_path / "b", found, {})
    assert torch.equal(found.table.weight, second.table.weight)


def test_element_types_of_models_are_kept(tmp_path: Path) -> None:
    model = nn.Module()
    for name, dtype in {"f16": torch.float16, "i32": torch.int32, "flag": torch.bool}.items():
        model.register_buffer(name, torch.tensor([[0, 1], [1, 1]]).to(dtype))
    write_checkpoint(tmp_path, model, {}, {}, window=1, start_window=0, global_step=0, version="1")
    other = copy.deepcopy(model)
    for buffer in other.buffers():
        buffer.zero_()
    read_checkpoint(tmp_path, read_manifest(tmp_path), other, {})
    for name, tensor in model.named_buffers():
        assert torch.equal(other.get_buffer(name), tensor)


def test_a_tied_weight_is_kept_once() -> None:
    assert "head.weight" not in model_tensors(Model())
    assert LoadedCheckpoint(1, 2, 3, 4, {}).global_step == 4

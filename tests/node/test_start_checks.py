"""The checks of a start: clock, dataset, disk."""

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tplr.chain.clocks import ManualClock
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.cli import parse_arguments
from tplr.errors import ConfigError, ObjectNotFound, StoreUnavailable
from tplr.hparams import HParams
from tplr.localnet.plan import scheme_constants
from tplr.node import start_checks
from tplr.node.arguments import node_arguments
from tplr.node.start_checks import check_answers, check_clock, check_compiler, check_fits
from tplr.training.device import DeviceSettings


async def check_against(path: Path, behind: float) -> None:
    """Check against a chain whose newest block is ``behind`` seconds old by this machine's clock."""
    clock = ManualClock(time.time() - behind - 600)
    Ledger.create(path, clock=clock)
    clock.advance(600)
    async with LocalChain(path, "me", clock=clock) as chain:
        await check_clock(chain)


async def test_a_clock_that_agrees_passes(tmp_path: Path) -> None:
    await check_against(tmp_path / "chain.db", behind=0)


@pytest.mark.parametrize("behind", [3600, -3600])
async def test_a_clock_far_off_is_named_with_what_to_do(tmp_path: Path, behind: int) -> None:
    with pytest.raises(ConfigError, match=r"this machine's clock is [+-]\d+ s off block \d+'s time: set it \(ntp\)"):
        await check_against(tmp_path / "chain.db", behind=behind)


async def test_a_dataset_is_reached_if_one_replica_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "RETRY_SECONDS", 0.05)

    class Store:
        def __init__(self, error: Exception) -> None:
            self.error = error

        async def head(self, _: str) -> None:
            raise self.error

    down: Any = Store(StoreUnavailable("503"))
    await check_answers([down, Store(ObjectNotFound("no such key"))])  # type: ignore[list-item]
    with pytest.raises(StoreUnavailable, match=r"the dataset's bucket does not answer: .*503"):
        await check_answers([down, down])


def test_a_disk_that_sufficed_at_the_first_start_suffices_beside_the_saved_states(tmp_path, monkeypatch) -> None:
    """The two existing states make room for the next ones."""
    hparams, taken = HParams.model_validate(scheme_constants("sparseloco")), 0
    args = node_arguments(parse_arguments(["miner", "--device", "cpu", "--state", str(tmp_path)]))
    needed = check_fits(hparams, args, torch.device("cpu")).disk
    state = needed // 3

    def usage(_: Path) -> SimpleNamespace:
        held = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        return SimpleNamespace(free=needed + state - held - taken)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    check_fits(hparams, args, torch.device("cpu"))
    for window in (5, 6):
        folder = args.state_folder / f"window-{window}"
        folder.mkdir(parents=True)
        with (folder / "shard-00000-00000.safetensors").open("wb") as file:
            file.truncate(state)
    check_fits(hparams, args, torch.device("cpu"))
    taken = 2 * state
    with pytest.raises(ConfigError, match="saved states take"):
        check_fits(hparams, args, torch.device("cpu"))


def test_a_missing_compiler_is_found_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the node's first window it would be a crash."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    compiled = DeviceSettings.of("cuda")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(start_checks.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    check_compiler(gpu, DeviceSettings.of("cuda", compile=False))
    with pytest.raises(ConfigError) as error:
        check_compiler(gpu, compiled)
    said = error.value.problems
    assert said[0] == "--compile finds no compiler: install gcc, set CC, or give --no-compile"
    assert said[1].startswith(f"--compile needs {tmp_path}/Python.h: install Python's headers")
    with pytest.raises(ConfigError, match=r"install g\+\+, set CXX"):
        check_compiler(cpu, compiled)
    (tmp_path / "Python.h").touch()
    for name in ("gcc", "g++"):
        (tmp_path / name).touch(mode=0o755)
        check_compiler(gpu if name == "gcc" else cpu, compiled)

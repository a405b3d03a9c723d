"""Start-up checks: the cause decides the exit status, and no check waits longer than its limit."""

import asyncio
import logging
import socket
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import FaultyChain

from tplr.chain.hotkeys import new_hotkey, save_hotkey
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.cli import parse_arguments
from tplr.config import Environment
from tplr.errors import ChainUnavailable, ConfigError, HubUnavailable, RateLimited, StoreUnavailable, TplrError
from tplr.hparams import HParams
from tplr.localnet.network import node_command, node_environment
from tplr.node import checks as checks_module
from tplr.node import start_checks, startup
from tplr.node.arguments import node_arguments
from tplr.node.checks import MISCONFIGURED, OUTSIDE_DOWN, Checks, answers_due
from tplr.node.startup import in_daemon_thread


def fail(error: TplrError) -> None:
    raise error


@pytest.mark.parametrize(
    "error",
    [ChainUnavailable("mute"), StoreUnavailable("503"), HubUnavailable("no hub"), RateLimited("too soon")],
)
def test_what_is_down_outside_is_another_status_than_what_is_wrong_here(error: TplrError, capsys) -> None:
    checks = Checks()
    assert checks.take("one", fail, error) is None
    assert checks.status == OUTSIDE_DOWN
    checks.show()
    assert "an external service is down, try again" in " ".join(capsys.readouterr().err.split())
    checks.take("two", fail, ConfigError(["a is missing", "b is missing"]))
    checks.take("two", fail, ConfigError("a is missing"))
    assert checks.status == MISCONFIGURED
    assert [problem.text for problem in checks.problems] == [str(error), "a is missing", "b is missing"]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert checks_module.check_device("cuda:0", 2) == torch.device("cuda:0")
    with pytest.raises(ConfigError, match="--device cuda: 2 GPUs for 4 ranks"):
        checks_module.check_device("cuda:0", 4)
    assert checks_module.check_device("cpu", 4) == torch.device("cpu")


def test_a_device_without_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device meta: it holds no values; give a device of this machine"):
        checks_module.check_device("meta")


async def test_what_does_not_answer_is_given_up() -> None:
    checks = Checks()
    assert await checks.wait("bucket", asyncio.sleep(3600), until=asyncio.get_running_loop().time() + 0.05) is None
    assert checks.status == OUTSIDE_DOWN
    assert checks.outside_down("bucket")
    assert not checks.outside_down("chain")
    assert "no answer within 15 s" in checks.problems[0].text


async def test_nobody_waits_for_a_check_to_end_that_is_given_up() -> None:
    """Such as a check that first closes a connection to a silent server."""
    closing, closed = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            closing.set()
            await closed.wait()
            raise StoreUnavailable("too late")

    checks = Checks()
    await checks.wait("bucket", stubborn(), until=asyncio.get_running_loop().time() + 0.01)
    await closing.wait()
    closed.set()
    while checks._given_up:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert [one.text.partition(":")[0] for one in checks.problems] == ["no answer within 15 s"]


async def test_a_time_out_of_the_check_s_own_is_an_error() -> None:
    async def broken() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await Checks().wait("bucket", broken())


class Recorded(Checks):
    """Records the name, the deadline and the outcome of each wait, and the loop's time at the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = 0.0
        self.waits: list[tuple[str, float | None]] = []
        self.cancelled: list[str] = []

    async def wait(self, name: str, coming: Any, *, until: float | None = None) -> Any:
        self.first = self.first or asyncio.get_running_loop().time()
        self.waits.append((name, until))
        try:
            return await super().wait(name, coming, until=until)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise


@pytest.mark.parametrize(
    ("name", "hub", "asked"),
    [
        ("miner-1", True, {"bucket", "dataset", "tokenizer", "wallet and chain"}),
        ("miner-1", False, {"bucket", "dataset", "wallet and chain"}),
        ("aggregator", False, {"bucket", "wallet and chain"}),
    ],
)
async def test_all_services_have_15_seconds_together(
    staged: Any, monkeypatch: pytest.MonkeyPatch, name: str, hub: bool, asked: set[str]
) -> None:
    """None answers: all are given up at the same time, so the wait is at most that long on any machine."""
    assert checks_module.ANSWER_SECONDS == 15
    monkeypatch.setattr(checks_module, "ANSWER_SECONDS", 0.3)
    release = threading.Event()

    @asynccontextmanager
    async def mute_chain(_: Any) -> Any:
        yield await asyncio.Event().wait()

    monkeypatch.setattr(startup, "_open_chain", mute_chain)
    checks = Recorded()
    async with staged() as stage, AsyncExitStack() as stack:
        hparams = stage.hparams
        if hub:
            monkeypatch.setattr(HParams, "load_tokenizer", lambda *_: release.wait())
            hparams = hparams.model_copy(update={"tokenizer_name": "somebody/elsewhere"})
        (stage.network.folder / "hparams.json").write_text(hparams.model_dump_json(exclude={"sparseloco"}))
        node = stage.setup(name)
        words = [str(word) for word in node_command(stage.network, node)]
        args = node_arguments(parse_arguments([node.role, *words[words.index("--netuid") :]]))
        with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, and never answers
            endpoint = f"http://127.0.0.1:{mute.getsockname()[1]}"
            environment = Environment(node_environment(stage.network, node, endpoint))
            assert await startup.prepare(args, environment, stack, checks) is None
            release.set()
    (due,) = {until for _, until in checks.waits if until}
    assert due - 0.3 <= checks.first
    problems = {one.check: one.text for one in checks.problems}
    assert problems.keys() == asked
    assert all(text.startswith("no answer within 0.3 s") for text in problems.values())
    # The only wait without its own limit: the read of the data, which ends when their bucket is given up.
    endless = [wait for wait, until in checks.waits if until is None]
    assert endless == checks.cancelled == (["dataset"] if name == "miner-1" and not hub else [])
    assert checks.status == OUTSIDE_DOWN
    if name == "miner-1":
        assert not logging.getLogger("huggingface_hub").handlers  # they would write each line a second time


async def test_a_daemon_thread_s_result_or_error_comes_back() -> None:
    assert await in_daemon_thread(lambda: 7) == 7
    with pytest.raises(ConfigError, match="wrong"):
        await in_daemon_thread(lambda: fail(ConfigError("wrong")))


def test_nobody_waits_for_a_thread_that_hangs() -> None:
    release = threading.Event()

    async def give_up() -> None:
        async with asyncio.timeout(0.05):
            await in_daemon_thread(release.wait)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert time.monotonic() - began < 30
    release.set()


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``await opened(Checks(), ...)`` checks a chain whose named calls fail; returns the chain, or None."""
    key = new_hotkey()
    Ledger.create(tmp_path / "chain", netuid=1, block_time=0.05)
    ledger = Ledger(tmp_path / "chain")
    ledger.register(key.ss58_address, "nobody")
    ledger.close()
    monkeypatch.setattr(start_checks, "HICCUP_SECONDS", 0.3)  # until the registration is in a block
    openings: list[str] = []

    async def run(checks: Checks, *failing: str, refused: int = 0) -> FaultyChain | None:
        @asynccontextmanager
        async def open_chain(_: Any) -> Any:
            openings.append("")
            if len(openings) <= refused:
                raise ChainUnavailable("refused")
            async with LocalChain(tmp_path / "chain", key, netuid=1) as chain:
                faulty = FaultyChain(chain)
                for call in failing:
                    faulty.fail(call, "lost")
                yield faulty

        monkeypatch.setattr(startup, "_open_chain", open_chain)
        args: Any = type("Arguments", (), {"wallet_hotkey": "h", "netuid": 1, "network": "local:chain", "archive": ()})
        async with AsyncExitStack() as stack:
            return await startup._checked_chain(args, stack, checks, answers_due())

    return run


async def test_a_hiccup_of_the_chain_is_no_problem(opened: Any) -> None:
    checks = Checks()
    chain = await opened(checks, "metagraph", "head", refused=1)
    assert checks.problems == []
    assert checks.neuron is not None
    assert chain.calls.count("metagraph") == chain.calls.count("head") == 2


async def test_a_chain_that_is_down_is_said_once_and_in_time(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Checks()
    assert await opened(checks, refused=2) is None
    assert [(one.check, one.text, one.outside) for one in checks.problems] == [("wallet and chain", "refused", True)]

    async def mute(*_: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(checks_module, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(FaultyChain, "metagraph", mute)
    checks = Checks()
    await opened(checks)
    assert [one.check for one in checks.problems] == ["registration"]
    assert checks.status == OUTSIDE_DOWN


@pytest.mark.parametrize("wallet", [True, False])
@pytest.mark.parametrize("archive", [(), ("wss://archive:none",)])
async def test_a_wrong_network_is_told_once_with_or_without_a_wallet(
    tmp_path: Path, wallet: bool, archive: tuple[str, ...]
) -> None:
    if wallet:
        save_hotkey(tmp_path, "w", "h", new_hotkey())
    options = ["--wallet.path", str(tmp_path), "--wallet.name", "w", "--wallet.hotkey", "h", "--state", str(tmp_path)]
    options += ["--subtensor.network", "atlantis", *(f"--subtensor.archive={url}" for url in archive)]
    args, checks = node_arguments(parse_arguments(["miner", "--device", "cpu", *options])), Checks()
    async with AsyncExitStack() as stack:
        assert await startup._checked_chain(args, stack, checks, answers_due()) is None
    wrong = "--subtensor.archive: " if archive else "--subtensor.network atlantis: "
    expected = [wrong] if wallet else [wrong, "hotkey 'h' of wallet 'w'"]
    assert checks.status == MISCONFIGURED
    assert len(checks.problems) == len(expected)
    for problem, text in zip(checks.problems, expected, strict=True):
        assert (problem.check, problem.text[: len(text)]) == ("wallet and chain", text)

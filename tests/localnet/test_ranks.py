"""A network whose validator and first miner run over two ranks of torchrun; one of the miner's ranks is killed."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from guides import from_guide

from tplr.localnet.network import HOTKEY
from tplr.localnet.plan import make_plan
from tplr.localnet.summary import summarize
from tplr.localnet.supervisor import Localnet
from tplr.watch.view import NodeView

CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"
WINDOWS = 5
WINDOW_SECONDS = 30.0  # a start of two ranks takes most of a shorter window

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def ranks_of(torchrun: int | None) -> dict[int, int]:
    """Process ids of the ranks that a ``torchrun`` has started."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    return {int(_variable(int(pid), "RANK")): int(pid) for pid in children}


def _variable(pid: int, name: str) -> str:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(one.split("=", 1) for one in entries if "=" in one)[name]


def included(witness: NodeView, uid: int | None) -> set[int]:
    """Windows in which ``witness`` applied an update of ``uid``."""
    return {window for window, one in witness.applied.items() if uid in one.included}


async def test_a_killed_rank_costs_its_miner_at_most_that_window(tmp_path: Path) -> None:
    plan = make_plan(
        miners=2, ranks=2, windows=WINDOWS, window_seconds=WINDOW_SECONDS, run_dir=tmp_path / "run", cache=CACHE
    )
    async with Localnet(plan) as net:
        torchrun, miner = net.nodes["miner-1"], net.view.nodes["miner-1"]
        values = {"4": 2, "NAME": "miner-1", "HOTKEY": HOTKEY}
        for command in (
            from_guide(
                "docs/miner.md",
                ".venv/bin/torchrun --standalone --nproc-per-node 4 --max-restarts 1000 neurons/miner.py "
                "--wallet.name NAME --wallet.hotkey HOTKEY",
                values,
            ),
            from_guide(
                "docs/engine.md",
                "torchrun --standalone --nproc-per-node 4 --max-restarts 1000 neurons/miner.py "
                "--wallet.name NAME --wallet.hotkey HOTKEY",
                values,
            ),
        ):
            command.check_run_by(torchrun.command)
        await net.wait_until(lambda view: view.completed >= 1, timeout=400)
        newest = miner.window or 0
        await net.wait_until(lambda _: (miner.window or 0) > newest, timeout=100)
        killed_in = (miner.window or 0) + 1
        await asyncio.sleep(1.0)  # until it has begun to train
        before = ranks_of(torchrun.pid)
        assert sorted(before) == [0, 1]
        os.kill(before[1], signal.SIGKILL)
        view = await net.wait_until(lambda view: view.completed >= WINDOWS, timeout=400)
        after = ranks_of(torchrun.pid)
        assert {_variable(pid, "TORCHELASTIC_RESTART_COUNT") for pid in after.values()} == {"1"}
        weights = await net.weights()

        witness = view.nodes["miner-2"]
        left_out = set(witness.applied) - included(witness, miner.uid)
        assert left_out <= {killed_in}
        assert killed_in + 1 in witness.applied
        # The validator and this miner over two ranks, the other miner in one process: the same models in every window.
        assert view.disagreements() == {}
        assert sorted(miner.applied) == list(range(min(miner.applied), max(miner.applied) + 1))
        summary = summarize(view, weights, windows=WINDOWS)
        assert summary.passed, summary

        torchrun.kill()  # its ranks end with it, although they are in sessions of their own
        async with asyncio.timeout(20):
            while any(Path(f"/proc/{pid}").exists() for pid in after.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

        # The same miner by the project's own launcher: it resumes from the state that torchrun's ranks saved.
        by_torchrun = max(miner.uploaded)
        command = from_guide(
            "docs/miner.md", ".venv/bin/tplr miner --ranks 4 --wallet.name NAME --wallet.hotkey HOTKEY", values
        )
        torchrun.command = [*command.process, *torchrun.command[torchrun.command.index("--netuid") :]]
        torchrun.start()
        await net.wait_until(lambda _: max(included(witness, miner.uid)) > by_torchrun, timeout=300)
        assert sorted(ranks_of(torchrun.pid)) == [0, 1]
        assert net.view.disagreements() == {}
        assert await torchrun.stop() == 0, torchrun.log_tail()

    log = torchrun.log.read_text()
    assert "all ranks restart" in log
    assert "saved state restored: next window to apply is" in log

"""A real network over HTTP trains, agrees and pays, and a killed miner recovers.

Three other nodes are refused by the chain: each logs the reason, and the network neither stops nor pays them.
"""

import asyncio
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from forked import ForkedCommands
from guides import GuideCommand, from_guide
from misfits import Misfits

from tplr.chain.ledger import Ledger
from tplr.errors import LocalnetError
from tplr.localnet.network import HOTKEY, NETUID
from tplr.localnet.plan import make_plan
from tplr.localnet.summary import summarize
from tplr.localnet.supervisor import Localnet
from tplr.page.document import RunDocument
from tplr.page.sentences import unpack

CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"
WINDOWS = 12
LOGGED = re.compile(r"\d\d:\d\d:\d\d [A-Z]+ ")

pytestmark = [pytest.mark.localnet, pytest.mark.timeout(400)]


class ReadBack:
    """Commands for the newest run, each in a separate process, without any environment settings."""

    def __init__(self, commands: ForkedCommands, folder: Path) -> None:
        self.run = folder / "runs" / "of-this-test"
        self.newest = folder / "runs" / "latest"
        self._commands = commands
        self._folder = folder

    async def __call__(self, command: GuideCommand, *more: str) -> str:
        """Return its output with more options, without log lines."""
        words = [*command.process, *more]
        running = self._commands.run(words, env=self._commands.env, folder=self._folder)
        status, printed = await asyncio.wait_for(running, 120)
        assert status == 0, (words, printed)
        return "".join(line for line in printed.splitlines(keepends=True) if not LOGGED.match(line))


@pytest.fixture
def read_back(tmp_path: Path) -> ReadBack:
    return ReadBack(ForkedCommands(tmp_path), tmp_path)


@pytest.mark.parametrize("outer_delay", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_killed_miner_agrees_again_and_everybody_is_paid(
    tmp_path: Path, read_back: ReadBack, outer_delay: int
) -> None:
    sizes = {"miners": 2, "windows": WINDOWS, "window_seconds": 7.5, "vocab_size": 1024, "outer_delay": outer_delay}
    plan = make_plan(**sizes, run_dir=read_back.run, cache=CACHE, share_imports=True)
    plan = replace(plan, latest=read_back.newest)
    async with Localnet(plan) as net, Misfits(net) as misfits:
        check_commands(net)
        victim, witness = net.nodes["miner-1"], net.view.nodes["miner-2"]
        # Both have passed probation and are on the list. All nodes have done two windows, so the victim has a saved
        # state.
        await net.wait_until(
            lambda view: view.completed >= 2 and any(1 in one.included for one in witness.applied.values()),
            timeout=200,
        )
        victim.kill()
        saved = net.plan.run_dir / "state" / f"{NETUID}-miner-1-{HOTKEY}-miner"
        assert (saved / "genesis").read_text() == Ledger(net.network.chain).genesis_hash + "\n"
        kept = await asyncio.to_thread(shutil.copytree, saved, tmp_path / "kept")
        killed_after = net.view.nodes["miner-1"].window
        assert killed_after is not None
        # Absent for at least two whole windows, which it must replay from the buckets.
        await net.wait_until(lambda _: (witness.window or 0) >= killed_after + 2, timeout=60)
        # Meanwhile another process watches the run's public data.
        command = from_guide("docs/monitoring.md", "tplr watch --local")
        watching = asyncio.create_task(read_back(command, "--once"))
        victim.start()
        view = await net.wait_until(lambda view: view.completed >= WINDOWS, timeout=150)
        weights = await net.weights()
        await misfits.refused()
        await misfits.check(weights)
        watched = await watching

        for name, child in net.nodes.items():
            assert await child.stop() == 0, f"{name} did not end cleanly:\n{child.log_tail()}"

    for shown in ("templar: localnet, netuid", "│ validator 0 ", "│ miner 1 ", "│ miner 2 "):
        assert shown in watched, watched

    # Replayed or live: no window is missing, and all of them give the same model.
    back = view.nodes["miner-1"]
    assert sorted(back.applied) == list(range(min(back.applied), max(back.applied) + 1))
    assert max(back.applied) >= killed_after + 3
    assert set(range(killed_after + 1, killed_after + 3)) <= set(view.shared_windows())
    assert view.disagreements() == {}
    assert all(set(one.included) <= {1, 2} for one in witness.applied.values())
    # While it was absent, its update was missing for all nodes; afterwards it counted again.
    skipped = {window: applied.skipped for window, applied in witness.applied.items() if applied.skipped}
    assert {1: "missing"} in skipped.values() or {1: "no_commit"} in skipped.values()
    assert 1 in witness.applied[max(back.uploaded & set(witness.applied))].included

    summary = summarize(view, weights, windows=WINDOWS)
    assert summary.passed, summary
    assert "saved state restored: next window to apply is" in victim.log.read_text()

    # The run has ended and its servers are stopped: a reader only needs its folder.
    events = map(json.loads, net.network.events("validator").read_text().splitlines())
    scored = str(min(event["window"] for event in events if event["event"] == "scores"))
    explain = from_guide("docs/scoring.md", "tplr explain --uid 4 --window 1234", {"4": 2, "1234": scored})
    explained = await read_back(explain, "--local")
    assert f"in window {scored}, seen by validator 0" in explained
    audit = from_guide("docs/scoring.md", "tplr audit --window 1234", {"1234": scored})
    audited = await read_back(audit, "--local", "--record", "audits.jsonl")
    assert audited.startswith("AGREES: validator 0")
    given = ("--json", "page.json", "--audits", "audits.jsonl")
    shown = await read_back(from_guide("docs/page.md", "tplr page --local"), *given)
    assert shown.strip() == "runs/latest/page.html"
    document = RunDocument.model_validate_json((tmp_path / "page.json").read_bytes())
    assert document.windows.count >= WINDOWS
    assert [node.name for node in document.nodes] == ["validator", "miner-1", "miner-2", "bystander"]
    rows = unpack(document.explanations, 2, int(scored) - document.windows.first)
    assert rows == [(line[:18].strip(), line[18:]) for line in explained.splitlines()[2:]]
    assert [stamp.agrees for stamp in document.audits] == [True]
    if outer_delay:
        assert len(trained_meanwhile(net.network.events("miner-2"))) >= WINDOWS // 2
        command = from_guide("docs/export.md", "tplr replay --local --from start --without-uid 1", {"1": 2})
        replayed = await read_back(command, "--to", scored)
        assert scored in [line.split()[0] for line in replayed.splitlines() if line], replayed
        # Not from the first weights, but from the killed miner's saved state, and from a checkpoint.
        windows = range(document.windows.first, document.windows.first + document.windows.count)
        readable = [one for one in windows if unpack(document.explanations, 2, one - windows.start)]
        newest = str(readable[-1])
        for source in (
            from_guide("docs/scoring.md", "tplr audit --window 1234 --from FOLDER", {"1234": newest, "FOLDER": kept}),
            from_guide("docs/scoring.md", "tplr audit --window 1234 --from checkpoint", {"1234": newest}),
        ):
            audited = await read_back(source, "--local")
            found = re.match(
                rf"AGREES: validator 0, windows (\d+) to {newest}: included sets and fingerprints", audited
            )
            assert found, audited
            assert windows.start < int(found[1]) <= int(newest)
    # The README's commands for users of the model.
    await read_back(from_guide("docs/export.md", "tplr export --local --out model"))
    await read_back(from_guide("docs/export.md", "tplr eval --local"))


def check_commands(net: Localnet) -> None:
    """Check that the nodes were started with the commands of their guides, with more options."""
    from_guide(
        "docs/miner.md",
        ".venv/bin/python neurons/miner.py --wallet.name NAME --wallet.hotkey HOTKEY --device cuda",
        {"NAME": "miner-1", "HOTKEY": HOTKEY, "cuda": "cpu"},
    ).check_run_by(net.nodes["miner-1"].command)
    from_guide(
        "docs/validator.md",
        ".venv/bin/python neurons/validator.py --wallet.name NAME --wallet.hotkey HOTKEY --device cuda",
        {"NAME": "validator", "HOTKEY": HOTKEY, "cuda": "cpu"},
    ).check_run_by(net.nodes["validator"].command)
    from_guide(
        "docs/aggregator.md",
        ".venv/bin/python neurons/aggregator.py --wallet.name NAME --wallet.hotkey HOTKEY --state FOLDER",
        {"NAME": "aggregator", "HOTKEY": HOTKEY, "FOLDER": net.plan.run_dir / "state"},
    ).check_run_by(net.nodes["aggregator"].command)


def trained_meanwhile(path: Path) -> list[int]:
    """Return the windows whose training began before, and ended after, the node applied the previous window."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    applied = {event["window"]: event["time"] for event in events if event["event"] == "applied"}
    return [
        event["window"]
        for event in events
        if event["event"] == "trained"
        and (at := applied.get(event["window"] - 1))
        and event["time"] - event["seconds"] < at < event["time"]
    ]


async def test_network_without_its_storage_stops_with_a_reason(tmp_path: Path) -> None:
    """The supervisor notices the end of any process, and names the log to read."""
    plan = make_plan(miners=1, windows=8, run_dir=tmp_path / "run", cache=CACHE)
    async with Localnet(plan) as net:
        assert net.storage.pid is not None
        os.kill(net.storage.pid, signal.SIGKILL)
        with pytest.raises(LocalnetError, match="storage ended unexpectedly by SIGKILL"):
            await net.wait_until(lambda _: False, timeout=30)
    assert not any(child.running for child in net.nodes.values())

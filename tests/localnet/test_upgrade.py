"""A network changes its rules half-way: who has the new file changes at the announced window, the other one stops."""

import json
from pathlib import Path

import pytest

from tplr.config import Environment
from tplr.localnet.plan import make_plan
from tplr.localnet.supervisor import Localnet
from tplr.node.checks import OUTDATED
from tplr.storage import S3Connections

CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"
AHEAD = 6  # windows between the announcement and the change: restarts take some
AFTER = 2  # windows that are watched under the new rules

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


async def test_new_rules_begin_everywhere_at_the_announced_window(tmp_path: Path) -> None:
    plan = make_plan(miners=2, windows=14, window_seconds=15.0, run_dir=tmp_path / "run", cache=CACHE)
    async with Localnet(plan) as net:
        net.lenient = True
        folder, late = net.network.folder, net.view.nodes["miner-2"]
        await net.wait_until(lambda view: view.completed >= 1, timeout=200)
        change = max(node.window or 0 for node in net.view.nodes.values()) + AHEAD
        hparams = json.loads((folder / "hparams.json").read_text())
        hparams["upgrades"] = [{"window": change, "spec_version": 2}]
        (folder / "hparams.json").write_text(json.dumps(hparams))
        for name in ("validator", "aggregator", "miner-1"):  # the file is read at a start: miner-2 keeps the old rules
            net.nodes[name].kill()
            net.nodes[name].start()
        informed = [net.view.nodes[name] for name in ("validator", "miner-1")]
        await net.wait_until(lambda _: all(change in node.applied for node in informed), timeout=300)
        await net.wait_until(lambda view: not view.nodes["miner-2"].running, timeout=60)
        log = net.network.log("miner-2").read_text()
        assert f"from window {change} on, the network follows version 2 of the rules, this node version 1" in log
        assert await net.nodes["miner-2"].stop() == OUTDATED
        assert max(late.applied) < change
        # With the new file it replays what it missed, across the change, and has the same model again.
        net.nodes["miner-2"].start()
        await net.wait_until(
            lambda view: all(change + AFTER in node.applied for node in (*informed, late)), timeout=300
        )
        assert net.view.disagreements() == {}
        async with S3Connections.of(Environment({"TPLR_S3_ENDPOINT": net.endpoint})) as connections:
            miner = connections.store(net.network.nodes[1].account.readable)
            updates = [info.key for info in await miner.list("gradient-")]
    windows = range(min(late.applied), change + AFTER + 1)
    assert set(windows) <= set(late.applied)

    versions = {int(key.split("-")[1]): key.rpartition("-v")[2][0] for key in updates}
    assert len(versions) == len(updates)
    assert {version for window, version in versions.items() if window < change} == {"1"}
    assert {version for window, version in versions.items() if window >= change} == {"2"}
    events = [json.loads(line) for line in net.network.events("miner-2").read_text().splitlines()]
    assert [one["since"] for one in events if one["event"] == "outdated"] == [change]

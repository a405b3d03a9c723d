"""A network changes its rules half-way: nodes with the new file switch at the announced window, others stop."""

import json
from pathlib import Path

import pytest

from tplr.config import Environment
from tplr.localnet.network import NodeSetup
from tplr.localnet.plan import make_plan
from tplr.localnet.process import Child
from tplr.localnet.supervisor import Localnet
from tplr.node.checks import OUTDATED
from tplr.storage import S3Connections

CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"
CHANGE = 13  # of all windows since the chain's first block; a run begins at about the fifth
AFTER = 2  # later windows in which all three are compared

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


class Announced(Localnet):
    """All nodes have the hparams file with the change from their start, except miner-2, which has the previous file."""

    def _node(self, node: NodeSetup, endpoint: str) -> Child:
        child, path = super()._node(node, endpoint), self.network.folder / "hparams.json"
        if node.name == "miner-2":
            child.command = [part.replace("hparams.json", "hparams-before.json") for part in child.command]
        if not path.with_name("hparams-before.json").exists():
            path.with_name("hparams-before.json").write_bytes(path.read_bytes())
            changed = json.loads(path.read_text()) | {"upgrades": [{"window": CHANGE, "spec_version": 2}]}
            path.write_text(json.dumps(changed))
        return child


async def test_new_rules_begin_everywhere_at_the_announced_window(tmp_path: Path) -> None:
    plan = make_plan(miners=2, windows=14, window_seconds=12.0, run_dir=tmp_path / "run", cache=CACHE)
    async with Announced(plan) as net:
        net.lenient = True  # miner-2 ends by itself
        child, late = net.nodes["miner-2"], net.view.nodes["miner-2"]
        informed = [net.view.nodes[name] for name in ("validator", "miner-1")]
        await net.wait_until(lambda _: bool(late.applied), timeout=200)
        await net.wait_until(lambda view: not view.nodes["miner-2"].running, timeout=200)
        assert await child.stop() == OUTDATED
        assert max(late.applied) < CHANGE
        log = net.network.log("miner-2").read_text()
        assert f"from window {CHANGE} on, the network follows version 2 of the rules, this node version 1" in log
        # With the new file it replays the missed windows, across the change, and has the same model again.
        child.command = [part.replace("hparams-before.json", "hparams.json") for part in child.command]
        child.start()
        last = CHANGE + AFTER
        await net.wait_until(lambda _: all(last in node.applied for node in (*informed, late)), timeout=300)
        assert net.view.disagreements() == {}
        async with S3Connections.of(Environment({"TPLR_S3_ENDPOINT": net.endpoint})) as connections:
            bucket = connections.store(net.network.nodes[0].account.readable)
            reports = [info.key for info in await bucket.list("debug-")]
    windows = range(min(late.applied), last + 1)
    assert set(windows) <= set(late.applied)

    versions = {int(key.split("-")[1]): key.rpartition("-v")[2][0] for key in reports}
    assert len(versions) == len(reports)
    assert {version for window, version in versions.items() if window < CHANGE} == {"1"}
    assert {version for window, version in versions.items() if window >= CHANGE} == {"2"}
    events = [json.loads(line) for line in net.network.events("miner-2").read_text().splitlines()]
    assert [one["since"] for one in events if one["event"] == "outdated"] == [CHANGE]

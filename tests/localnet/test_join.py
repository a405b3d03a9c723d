"""A newcomer joins a running network with ``tplr join``; its service trains, and its updates are applied."""

import json
import re
import shlex
from pathlib import Path

import pytest
from forked import ForkedCommands, unframed
from guides import from_guide
from misfits import added

from tplr.chain.ledger import Ledger
from tplr.config import process_variables
from tplr.localnet.accounts import bucket_variables
from tplr.localnet.network import HOTKEY, MINER_STAKE, NETUID, base_environment, node_environment
from tplr.localnet.plan import make_plan
from tplr.localnet.process import Child
from tplr.localnet.supervisor import Localnet
from tplr.watch.view import NodeView

CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"

pytestmark = [pytest.mark.localnet, pytest.mark.long, pytest.mark.timeout(600)]


def service(unit: Path, env: dict[str, str]) -> Child:
    """The process that systemd would start: with the unit's command, folder and variables, and nothing of this
    process."""
    text = unit.read_text()
    [command], [folder] = (re.findall(rf"^{name}=(.*)$", text, re.M) for name in ("ExecStart", "WorkingDirectory"))
    given = [one.split("=", 1) for line in re.findall("^Environment=(.*)$", text, re.M) for one in shlex.split(line)]
    return Child("newcomer", shlex.split(command), env=env | dict(given), folder=Path(folder), log=Path(folder) / "log")


async def test_who_joins_takes_part(tmp_path: Path) -> None:
    plan = make_plan(miners=1, windows=40, window_seconds=10.0, run_dir=tmp_path / "run", cache=CACHE)
    async with Localnet(plan) as net:
        network = net.network
        bare = base_environment(process_variables(), tmp_path / "home")
        newcomer = await added(network, "newcomer", "miner")
        ledger = Ledger(network.chain)
        uid = ledger.register(newcomer.address, "cold-newcomer", stake=MINER_STAKE)
        ledger.close()
        chain = ("--network", f"local:{network.chain}")
        wallet = ("--wallet.path", network.folder / "wallets", "--wallet.name", "newcomer", "--wallet.hotkey", HOTKEY)
        commands = ForkedCommands(tmp_path)

        async def run(words: list[object], env: dict[str, str]) -> str:
            status, printed = await commands.run(words, env=env | {"COLUMNS": "200"}, folder=network.folder)
            assert status == 0, printed
            return unframed(printed)

        init = from_guide(
            "docs/run.md",
            ".venv/bin/tplr run init --name NAME --netuid 3 --hparams hparams.json --link website=https://example.org",
            {"NAME": "toy", "3": NETUID},
        )
        await run([*init.process, *chain], node_environment(network, network.nodes[0], net.endpoint))
        await net.wait_until(lambda view: view.completed >= 1, timeout=200)
        join = from_guide("docs/run.md", ".venv/bin/tplr join run.toml --install")
        own = ("--device", "cpu", "--no-input", "--folder", tmp_path / "node", "--unit-folder", tmp_path / "units")
        (tmp_path / "node").mkdir()
        keys = bucket_variables("gradients", newcomer.account, "read", "write")
        said = await run([*join.process, *wallet, *own], bare | keys)
        assert f"all passed; uid {uid}" in said
        child = service(tmp_path / "units" / "tplr-toy-miner.service", bare)
        child.start()
        try:
            witness = net.view.nodes["miner-1"]
            await net.wait_until(lambda _: included(witness, uid) or not child.running, timeout=200)
            assert child.running, child.log_tail()
            assert included(witness, uid)
        finally:
            assert await child.stop() == 0, child.log_tail()
        events = [json.loads(line) for line in (tmp_path / "node" / "miner-events.jsonl").read_text().splitlines()]
        assert {"trained", "applied", "uploaded"} <= {event["event"] for event in events}


def included(witness: NodeView, uid: int) -> bool:
    """Whether an update of ``uid`` is part of the model that ``witness`` has."""
    return any(uid in one.included for one in witness.applied.values())

"""Neurons that the chain refuses: each logs why, and the others keep training."""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import pytest

from tplr.chain.hotkeys import new_hotkey, save_hotkey
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.files import atomic_write
from tplr.localnet.accounts import key_table, new_account
from tplr.localnet.network import HOTKEY, NodeSetup, Role, node_command, node_environment
from tplr.localnet.plan import make_plan
from tplr.localnet.process import Child
from tplr.localnet.supervisor import Localnet

CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"
WINDOWS = 10

pytestmark = [pytest.mark.localnet, pytest.mark.timeout(300)]


async def add_node(net: Localnet, name: str, role: Role) -> tuple[NodeSetup, Child]:
    """One more neuron of a network that runs: wallet, bucket and keys are there, registration is not."""
    network, node = net.network, NodeSetup(name, role, new_hotkey(), new_account())
    save_hotkey(network.folder / "wallets", name, HOTKEY, node.hotkey)
    keys = json.loads(network.keys.read_text()) | key_table([node.account])
    await asyncio.to_thread(atomic_write, network.keys, json.dumps(keys).encode())
    facts = json.loads((network.folder / "storage-ready.json").read_text())
    env = node_environment(network, node, f"http://{facts['host']}:{facts['port']}")
    child = Child(name, node_command(network, node), env=env, folder=network.folder, log=network.log(name))
    return node, child


def table_text(log: Path) -> str:
    """What a node printed, without the frames and line breaks of its table."""
    return " ".join(log.read_text().replace("│", " ").split())


async def test_three_misfits_get_a_reason_and_the_others_train(tmp_path: Path) -> None:
    plan = make_plan(miners=2, windows=WINDOWS, window_seconds=7.5, run_dir=tmp_path / "run", cache=CACHE)
    async with Localnet(plan) as net:
        bystander, observing = await add_node(net, "bystander", "validator")
        stranger, strange = await add_node(net, "stranger", "miner")
        garbler = new_hotkey().ss58_address
        admin = Ledger(net.network.chain)
        admin.set_limits(max_validators=1)  # the first validator, with more stake, takes the only permit
        admin.register(bystander.address, stake=2 * net.network.hparams.eval_stake_limit)
        admin.register(garbler)
        admin.submit(garbler, "commit", "127.0.0.1:8091")
        admin.close()
        for child in (observing, strange):
            child.start()
        try:
            refused = "weights not set: NeuronNoValidatorPermit"
            async with asyncio.timeout(200), aclosing(net.views()) as views:
                async for view in views:
                    if view.completed >= WINDOWS and refused in observing.log.read_text():
                        break
            assert not strange.running
            strange_status = await strange.stop()
        finally:
            await asyncio.gather(observing.stop(), strange.stop())
        async with LocalChain(net.network.chain, hotkey="") as chain:
            graph, weights = await chain.metagraph(), await chain.weights()

    # One message each, with what to do.
    assert f"uid {graph.uid_of(bystander.address)} holds no validator permit; epochs give them by stake" in (
        observing.log.read_text()
    )
    assert strange_status == 2
    assert f"({stranger.address}) has no uid on subnet 3: register it" in table_text(strange.log)
    uid = graph.uid_of(garbler)
    for name in ("validator", "miner-1", "miner-2"):
        log = net.network.log(name).read_text()
        assert log.count(f"commitment of uid {uid} ({garbler}) names no bucket") == 1
        assert "expected 128 characters, got 14" in log
        assert "127.0.0.1:8091" not in log

    # And the others neither stop, nor disagree, nor pay them.
    assert view.disagreements() == {}
    applied = view.nodes["miner-1"].applied.values()
    assert any({1, 2} <= set(one.included) for one in applied)
    assert all(set(one.included) <= {1, 2} for one in applied)
    assert set(weights) == {0}
    assert set(weights[0]) <= {1, 2}
    assert bystander.address not in {graph.neurons[uid].hotkey for uid in weights}

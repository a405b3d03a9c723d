"""Three nodes that the chain refuses: no permit, no uid, a commitment that names no bucket."""

import asyncio
import json
from pathlib import Path
from typing import Self

from tplr.chain.hotkeys import new_hotkey, save_hotkey
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.files import atomic_write
from tplr.localnet.accounts import key_table, new_account
from tplr.localnet.network import HOTKEY, Network, NodeSetup, Role, node_command, node_environment
from tplr.localnet.process import Child
from tplr.localnet.supervisor import Localnet

NOT_BUCKET = "127.0.0.1:8091"
REFUSED = "weights not set: NeuronNoValidatorPermit"


class Misfits:
    """A validator without a permit, a miner without a uid, and a hotkey with a false commitment; they run during the
    block. ``net`` is already running, with as many validators as the chain gives permits.
    """

    def __init__(self, net: Localnet) -> None:
        self._net = net

    async def __aenter__(self) -> Self:
        """Register and start them."""
        self._bystander, self._observing = await self._added("bystander", "validator")
        self._stranger, self._strange = await self._added("stranger", "miner")
        self._garbler = new_hotkey().ss58_address
        admin = Ledger(self._net.network.chain)
        admin.set_limits(max_validators=1)  # the first validator, with more stake, takes the only permit
        admin.register(self._bystander.address, stake=2 * self._net.network.hparams.eval_stake_limit)
        admin.register(self._garbler)
        admin.submit(self._garbler, "commit", NOT_BUCKET)
        admin.close()
        async with LocalChain(self._net.network.chain, hotkey="") as chain, asyncio.timeout(30):
            # Nodes see final blocks only.
            while (await chain.metagraph()).uid_of(self._bystander.address) is None:  # noqa: ASYNC110 - as below
                await asyncio.sleep(0.2)
        for child in (self._observing, self._strange):
            child.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End them."""
        await asyncio.gather(self._observing.stop(), self._strange.stop())

    async def _added(self, name: str, role: Role) -> tuple[NodeSetup, Child]:
        network = self._net.network
        node = await added(network, name, role)
        env = node_environment(network, node, self._net.endpoint)
        where = {"folder": network.folder, "log": network.log(name), "server": self._net.fork_server}
        return node, Child(name, node_command(network, node), env=env, **where)

    async def refused(self) -> None:
        """Return when the chain has refused the bystander's weights."""
        async with asyncio.timeout(60):
            while REFUSED not in self._observing.log.read_text():
                assert self._observing.running, self._observing.log_tail()
                await asyncio.sleep(0.5)

    async def check(self, weights: dict[int, dict[int, float]]) -> None:
        """Check that each was told once why it was refused and what to do, and that no node pays or believes them."""
        assert not self._strange.running
        assert await self._strange.stop() == 2
        said = _table_text(self._strange.log)
        assert f"({self._stranger.address}) has no uid on subnet 3: register it" in said
        async with LocalChain(self._net.network.chain, hotkey="") as chain:
            graph = await chain.metagraph()
        without_permit = (
            f"uid {graph.uid_of(self._bystander.address)} has no validator permit; each epoch grants permits by stake"
        )
        assert without_permit in self._observing.log.read_text()
        uid = graph.uid_of(self._garbler)
        for name in ("validator", "miner-2"):
            log = self._net.network.log(name).read_text()
            assert log.count(f"commitment of uid {uid} ({self._garbler}) is not a bucket") == 1
            assert "expected 128 characters, got 14" in log
            assert NOT_BUCKET not in log
        assert set(weights) == {0}
        assert set(weights[0]) <= {1, 2}


async def added(network: Network, name: str, role: Role) -> NodeSetup:
    """Add one more neuron with wallet, bucket and keys, but without registration."""
    node = NodeSetup(name, role, new_hotkey(), new_account())
    save_hotkey(network.folder / "wallets", name, HOTKEY, node.hotkey)
    keys = json.loads(network.keys.read_text()) | key_table([node.account])
    await asyncio.to_thread(atomic_write, network.keys, json.dumps(keys).encode())
    return node


def _table_text(log: Path) -> str:
    """Return a node's output without the frames and line breaks of its table."""
    return " ".join(log.read_text().replace("│", " ").split())

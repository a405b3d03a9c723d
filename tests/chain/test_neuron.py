"""A whole miner on a subtensor node: wallet from disk, the SDK, checks, its bucket on chain, and a clean exit."""

import asyncio
import json
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("bittensor")

from forked_python import interpreter
from worlds import NETUID, NodeWorld

from tplr.chain.commitment import encode_commitment
from tplr.localnet.dataset import prepared_corpus, upload_dataset
from tplr.localnet.network import lay_out, node_command, node_environment
from tplr.localnet.plan import make_plan
from tplr.testing.s3server import serve

CACHE = Path(__file__).parents[2] / ".cache/tplr/localnet"


def replaced(command: list[str], **values: str) -> list[str]:
    """Return ``command`` with other values for the named arguments."""
    command = list(command)
    for name, value in values.items():
        command[command.index(f"--{name.replace('_', '.')}") + 1] = value
    return command


@pytest.mark.timeout(180)
async def test_a_miner_joins_through_the_sdk(tmp_path):
    plan = make_plan(miners=1, windows=2, run_dir=tmp_path / "run", cache=CACHE)
    corpus = prepared_corpus(plan.cache, plan.corpus, plan.vocab_size)
    network = lay_out(plan, corpus)
    miner = network.nodes[1]
    constants = network.folder / "hparams.json"
    constants.write_text(json.dumps(json.loads(constants.read_text()) | {"blocks_per_window": 200}))
    async with serve(network.storage, network.keys) as server, NodeWorld(tmp_path) as world:
        await upload_dataset(corpus, network.dataset.writable, server.endpoint)
        await world.join("miner")
        command = replaced(
            [str(part) for part in node_command(network, miner)],
            netuid=str(NETUID),
            wallet_name="miner",
            wallet_path=str(world.folder / "wallets"),
            subtensor_network=world.node.url,
        )
        process = await asyncio.create_subprocess_exec(
            *interpreter(),
            *command[1:],
            env=node_environment(network, miner, server.endpoint),
            cwd=network.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        wanted = encode_commitment(miner.account.readable)
        async with asyncio.timeout(120):
            while process.returncode is None and wanted not in held(world):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            await asyncio.sleep(1)  # it continues and waits for the start window
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        assert wanted in held(world)
        assert "waiting for the electors' start window" in output.decode()
        assert miner.account.readable.secret_access_key not in output.decode()


def held(world: NodeWorld) -> list[str]:
    """All commitments on chain."""
    return [commitment.data for commitment in world.admin.commitments().values()]

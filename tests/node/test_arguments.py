"""Command-line arguments of a neuron that select the chain."""

import pytest

from tplr.chain.hotkeys import new_hotkey, save_hotkey
from tplr.chain.ledger import Ledger
from tplr.cli import parse_arguments
from tplr.errors import ChainUnavailable
from tplr.node.arguments import node_arguments
from tplr.node.startup import _open_chain
from tplr.training.device import DeviceSettings


@pytest.mark.parametrize(
    ("given", "archive"),
    [
        ([], ()),
        (["--subtensor.archive", "wss://one:443"], ("wss://one:443",)),
        (["--subtensor.archive", "wss://one:443, ws://two,"], ("wss://one:443", "ws://two")),
    ],
)
def test_archives_are_urls_with_commas_between(given, archive):
    assert node_arguments(parse_arguments(["miner", *given])).archive == archive


def test_settings_of_the_device_are_given_one_by_one():
    plain = node_arguments(parse_arguments(["miner"])).device_settings
    assert plain == DeviceSettings.of("cuda")
    line = ["--no-compile", "--checkpointing", "full", "--loss-rows", "64", "--offload-weights"]
    given = node_arguments(parse_arguments(["miner", *line])).device_settings
    assert given == DeviceSettings.of("cuda", compile=False, checkpointing="full", loss_rows=64, offload_weights=True)
    validator = node_arguments(parse_arguments(["validator", "--gather-bfloat16"])).device_settings
    assert validator == DeviceSettings.of("cuda", gather_bfloat16=False)
    assert node_arguments(parse_arguments(["miner", "--device", "cpu"])).device_settings == DeviceSettings()
    with pytest.raises(SystemExit):
        parse_arguments(["miner", "--loss-rows", "0"])


async def test_an_archive_on_the_command_line_shows_old_state(tmp_path):
    chain_file = tmp_path / "chain.sqlite"
    Ledger.create(chain_file, netuid=3, block_time=0.02, retained_blocks=1, skipped_slots=0.0)
    save_hotkey(tmp_path, "me", "default", new_hotkey())
    line = ["--subtensor.network", f"local:{chain_file}", "--wallet.path", str(tmp_path), "--wallet.name", "me"]
    async with _open_chain(node_arguments(parse_arguments(["miner", *line]))) as chain:
        async for number in chain.blocks():
            if number >= 4:
                break
        with pytest.raises(ChainUnavailable, match=r"--subtensor\.archive"):
            await chain.metagraph(1)
    async with _open_chain(node_arguments(parse_arguments(["miner", *line, "--subtensor.archive", "any"]))) as chain:
        assert (await chain.metagraph(1)).block == 1

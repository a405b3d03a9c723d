"""Command-line arguments of a node: those that select the chain and the device, and wrong values."""

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


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--events-max-mb", "nan"),
        ("--events-max-mb", "0"),
        ("--rank-timeout", "nan"),
        ("--metrics-port", "99999"),
        ("--loss-rows", "0"),
        ("--wallet.path", "~no-such-user/wallets"),
        ("--state", "~no-such-user/state"),
    ],
)
def test_a_wrong_value_is_refused_by_the_parser(option, value, capsys):
    with pytest.raises(SystemExit) as end:
        parse_arguments(["miner", option, value])
    assert end.value.code == 2
    assert f"argument {option}: {value}: " in capsys.readouterr().err


def test_the_home_folder_stands_for_the_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    args = node_arguments(parse_arguments(["miner", "--state", "~/here"]))
    assert str(args.wallet_path) == "/home/somebody/.bittensor/wallets"
    assert str(args.state_folder) == "/home/somebody/here/3-default-default-miner"


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

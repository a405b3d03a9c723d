"""A node's state belongs to one chain: a later start at another one is refused, with both named."""

import re

import pytest

from tplr.chain.hotkeys import new_hotkey, save_hotkey
from tplr.chain.ledger import Ledger
from tplr.cli import parse_arguments
from tplr.errors import ConfigError
from tplr.node.arguments import node_arguments
from tplr.node.known_chain import remember_chain
from tplr.node.startup import _open_chain


async def test_a_later_start_at_another_chain_is_refused(tmp_path):
    save_hotkey(tmp_path, "me", "default", new_hotkey())
    wallet = ["--wallet.path", str(tmp_path), "--wallet.name", "me", "--state", str(tmp_path)]

    def args(chain: str):
        return node_arguments(parse_arguments(["miner", *wallet, "--subtensor.network", f"local:{tmp_path / chain}"]))

    for name in ("one", "two"):
        Ledger.create(tmp_path / name, netuid=3)
    for _ in range(2):  # nothing is kept until a node runs
        async with _open_chain(args("two")) as two:
            pass
    for _ in range(2):
        async with _open_chain(args("one")) as one:
            remember_chain(args("one").state_folder, one.genesis)
    with pytest.raises(ConfigError) as refused:
        await _open_chain(args("two")).__aenter__()
    file = args("one").state_folder / "genesis"
    for said in (one.genesis, two.genesis, "check --subtensor.network", f"delete {file}"):
        assert said in str(refused.value)
    file.write_text("half a ha")
    with pytest.raises(ConfigError, match=re.escape(f"{file}: expected")):
        await _open_chain(args("one")).__aenter__()

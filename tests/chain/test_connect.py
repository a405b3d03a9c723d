"""From an operator's arguments to an open chain."""

import json
import subprocess
import sys

import pytest

from tplr.chain.connect import load_local_hotkey, open_chain, save_local_hotkey
from tplr.chain.ledger import Ledger
from tplr.errors import ConfigError


@pytest.fixture
def wallet(tmp_path):
    save_local_hotkey(tmp_path / "wallets", "miner", "default", "5Local")
    return {"wallet_path": tmp_path / "wallets", "wallet_name": "miner", "hotkey": "default"}


async def test_a_local_network_opens_its_file_under_the_wallets_address(wallet, tmp_path):
    Ledger.create(tmp_path / "chain.db", netuid=1)
    async with open_chain(f"local:{tmp_path}/chain.db", netuid=1, **wallet) as chain:
        assert chain.hotkey == "5Local"
        assert chain.netuid == 1
        assert await chain.head() == 0
    with pytest.raises(ConfigError, match="holds subnet 1"):
        async with open_chain(f"local:{tmp_path}/chain.db", netuid=2, **wallet):
            pass


def test_a_local_chain_needs_no_sdk():
    code = "import sys, tplr.chain, tplr.chain.connect, tplr.chain.local; sys.exit('bittensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_address_is_read_from_a_real_wallets_field(tmp_path):
    path = tmp_path / "w" / "hotkeys" / "h"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"publicKey": "0x00", "secretPhrase": "never read", "ss58Address": "5Grw"}))
    assert load_local_hotkey(tmp_path, "w", "h") == "5Grw"


@pytest.mark.parametrize(
    "text", [None, "", "secretPhrase here", "[]", "{}", '{"ss58Address": ""}', '{"ss58Address": 5}']
)
def test_a_file_without_address_is_named_and_not_shown(tmp_path, text):
    path = tmp_path / "w" / "hotkeys" / "h"
    if text is not None:
        path.parent.mkdir(parents=True)
        path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_local_hotkey(tmp_path, "w", "h")
    assert str(path) in str(refused.value)
    assert "secretPhrase" not in str(refused.value)

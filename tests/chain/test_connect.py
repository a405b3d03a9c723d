"""An operator's arguments open the right chain."""

import pytest
from bittensor_core import Keypair

from tplr.chain.connect import open_chain
from tplr.chain.hotkeys import save_hotkey
from tplr.chain.ledger import Ledger
from tplr.errors import ConfigError

HOTKEY = Keypair.create_from_uri("//me")


@pytest.fixture
def wallet(tmp_path):
    save_hotkey(tmp_path / "wallets", "miner", "default", HOTKEY)
    return {"wallet_path": tmp_path / "wallets", "wallet_name": "miner", "hotkey": "default"}


async def test_a_local_network_opens_its_file_under_the_wallets_address(wallet, tmp_path):
    Ledger.create(tmp_path / "chain.db", netuid=1)
    async with open_chain(f"local:{tmp_path}/chain.db", netuid=1, **wallet) as chain:
        assert chain.hotkey == HOTKEY.ss58_address
        assert chain.netuid == 1
        assert await chain.head() == 0
    with pytest.raises(ConfigError, match="holds subnet 1"):
        async with open_chain(f"local:{tmp_path}/chain.db", netuid=2, **wallet):
            pass

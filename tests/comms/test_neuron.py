"""``Comms`` from the environment of a process."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bittensor.wallet import Wallet
from three_nodes import HOTKEYS, STATE, W

import tplr
from tplr.chain.commitment import encode_commitment
from tplr.chain.hotkeys import save_hotkey
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.comms import Comms
from tplr.errors import ConfigError
from tplr.hparams import HParams
from tplr.localnet.accounts import bucket_variables, key_table, new_account
from tplr.storage import S3Connections
from tplr.testing.s3server import serve


@pytest.fixture
async def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """A process whose environment names a bucket and a folder, and a wallet that is registered on a chain in a file.

    Yields the chain's file. The working directory is empty.
    """
    account, path = new_account(), tmp_path / "chain.db"
    Ledger.create(path, netuid=7, block_time=0.2, finality_lag=0)
    admin = Ledger(path)
    admin.register(HOTKEYS["alice"].ss58_address, "cold", stake=2.0, permit=True)
    admin.close()
    save_hotkey(tmp_path / "wallets", "owner", "alice", HOTKEYS["alice"])
    async with LocalChain(path, HOTKEYS["alice"]) as chain:
        await chain.commit(encode_commitment(account.readable))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    (tmp_path / "cwd" / ".env").touch()  # ends the search for another one
    async with serve(tmp_path / "s3", key_table([account])) as server:
        variables = bucket_variables("gradients", account, "read", "write") | {"TPLR_S3_ENDPOINT": server.endpoint}
        for name, value in (variables | {"TPLR_CACHE_FOLDER": str(tmp_path / "cache")}).items():
            monkeypatch.setenv(name, value)
        yield path


async def test_from_the_environment(alone: Path, hparams: HParams, caplog: pytest.LogCaptureFixture) -> None:
    wallet = Wallet("owner", "alice", str(alone.parent / "wallets"))
    caplog.set_level("INFO")
    async with tplr.Comms.from_env(hparams, wallet=wallet, netuid=7, network=f"local:{alone}") as comms:
        assert len([line for line in caplog.messages if re.search(r"\d+ checkpoint parts, \d+ peers$", line)]) == 1
        assert (comms.uid, comms.hotkey, comms.alone) == (0, HOTKEYS["alice"].ss58_address, True)
        for local in (True, False):
            await comms.put(STATE, None, W, "gradient", 7, local=local)
            assert (await comms.get(0, W, "gradient", local=local)).global_step == 7
    assert [path.name for path in Path.cwd().iterdir()] == [".env"]
    assert len(list((alone.parent / "cache/states/7/0").iterdir())) == 1


async def test_local_states_are_in_the_cache_folder_by_default(alone: Path, hparams: HParams) -> None:
    bucket = new_account().writable
    async with LocalChain(alone, HOTKEYS["alice"]) as chain, S3Connections() as connections:
        comms = Comms(chain, hparams, connections, own_bucket=bucket)
        await comms.put(STATE, 3, W, "debug", 7)
    assert [path.name for path in Path.cwd().iterdir()] == [".env"]
    assert len(list((alone.parent / "cache/states/7/3").iterdir())) == 1


async def test_all_that_is_wrong_with_the_environment_is_said_at_once(
    alone: Path, hparams: HParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("R2_GRADIENTS_READ_ACCESS_KEY_ID")
    monkeypatch.setenv("R2_AGGREGATOR_BUCKET_NAME", "x")
    monkeypatch.setenv("R2_CHECKPOINTS_ACCOUNT_ID", "a/b")
    monkeypatch.setenv("TPLR_S3_REGION", "no region")
    monkeypatch.setenv("HTTPS_PROXY", "foo://host")
    monkeypatch.setenv("TPLR_TRANSFERS", "many")
    wallet = Wallet("owner", "alice", str(alone.parent / "wallets"))
    with pytest.raises(ConfigError) as caught:
        async with Comms.from_env(hparams, wallet=wallet, netuid=7, network=f"local:{alone}"):
            raise AssertionError
    buckets = ("R2_GRADIENTS_READ_ACCESS_KEY_ID", "R2_AGGREGATOR_BUCKET_NAME", "R2_CHECKPOINTS_ACCOUNT_ID")
    for name in (*buckets, "TPLR_S3_REGION", "HTTPS_PROXY", "TPLR_TRANSFERS"):
        assert str(caught.value).count(name) == 1

"""Hotkey files, and signatures of real key pairs."""

import json
from pathlib import Path

import bittensor as bt
import pytest
from bittensor_core import Keypair

from tplr.chain import hotkeys
from tplr.chain.hotkeys import CRYPTO_TYPES, load_hotkey, new_hotkey, save_hotkey
from tplr.chain.local import LocalChain
from tplr.errors import ConfigError

ALICE = Keypair.create_from_uri("//alice")


@pytest.mark.parametrize("crypto_type", CRYPTO_TYPES)
def test_a_signature_is_of_one_key_and_one_message(crypto_type: int) -> None:
    alice = Keypair.create_from_uri("//alice", crypto_type)
    signature = hotkeys.sign(alice, b"message")
    assert len(signature) == 64
    assert hotkeys.verify(alice.ss58_address, b"message", signature)
    assert not hotkeys.verify(alice.ss58_address, b"massage", signature)
    assert not hotkeys.verify(new_hotkey().ss58_address, b"message", signature)
    for bit in range(0, 512, 7):
        damaged = bytearray(signature)
        damaged[bit // 8] ^= 1 << bit % 8
        assert not hotkeys.verify(alice.ss58_address, b"message", bytes(damaged)), bit


@pytest.mark.parametrize("signature", [b"", b"\0" * 63, b"\0" * 64, b"\xff" * 64, b"\0" * 65, b"\0" * 10_000])
def test_what_is_no_signature_is_no_error(signature: bytes) -> None:
    assert not hotkeys.verify(ALICE.ss58_address, b"message", signature)


@pytest.mark.parametrize("address", ["", "me", "5Alice", ALICE.ss58_address[:-1] + "x", "\0", "é" * 48])
def test_what_is_no_address_has_signed_nothing(address: str) -> None:
    assert not hotkeys.verify(address, b"message", hotkeys.sign(ALICE, b"message"))


def test_an_address_alone_cannot_sign(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{ALICE.ss58_address} has no private key on this machine"):
        hotkeys.sign(Keypair(ss58_address=ALICE.ss58_address), b"message")


async def test_a_local_chain_opened_by_an_address_cannot_sign(tmp_path: Path) -> None:
    from tplr.chain.ledger import Ledger

    Ledger.create(tmp_path / "chain.db")
    async with LocalChain(tmp_path / "chain.db", "me") as chain:
        with pytest.raises(ConfigError, match="'me' was opened without its key"):
            chain.sign(b"message")


def test_a_saved_hotkey_is_loaded_here_and_by_the_sdk(tmp_path: Path) -> None:
    save_hotkey(tmp_path, "w", "h", ALICE)
    path = tmp_path / "w" / "hotkeys" / "h"
    assert path.stat().st_mode & 0o777 == 0o600
    for loaded in (load_hotkey(tmp_path, "w", "h"), bt.Wallet("w", "h", str(tmp_path)).hotkey):
        assert loaded.ss58_address == ALICE.ss58_address
        assert hotkeys.verify(ALICE.ss58_address, b"message", hotkeys.sign(loaded, b"message"))


def test_a_hotkey_of_the_sdk_is_loaded(tmp_path: Path) -> None:
    wallet = bt.Wallet("w", "h", str(tmp_path))
    wallet.create_new_hotkey(use_password=False, suppress=True)
    signature = hotkeys.sign(load_hotkey(tmp_path, "w", "h"), b"message")
    assert hotkeys.verify(wallet.hotkey.ss58_address, b"message", signature)


@pytest.mark.parametrize("text", [None, "", "secretPhrase here", "[]", "{}", json.dumps({"ss58Address": "5Grw"})])
def test_a_file_without_a_key_is_named_and_not_shown(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "w" / "hotkeys" / "h"
    if text is not None:
        path.parent.mkdir(parents=True)
        path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_hotkey(tmp_path, "w", "h")
    assert str(path) in str(refused.value)
    assert "secretPhrase" not in str(refused.value)

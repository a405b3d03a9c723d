"""Hotkeys: files of a wallet, signatures and their verification, without the chain's SDK."""

import secrets
from pathlib import Path

import bittensor_core
from bittensor_core import KeyfileError, Keypair

from tplr.errors import ConfigError
from tplr.home_paths import expanded

# An address does not show which of the two its key type is; the chain accepts a signature of either.
CRYPTO_TYPES = (bittensor_core.CRYPTO_SR25519, bittensor_core.CRYPTO_ED25519)


def new_hotkey() -> Keypair:
    """Return a random key pair."""
    return Keypair.create_from_seed(secrets.token_bytes(32))


def sign(keypair: Keypair, message: bytes) -> bytes:
    """Sign: 64 bytes; sr25519 gives a different signature each call. Raises ConfigError without a private key."""
    try:
        return keypair.sign(message)
    except ValueError:
        raise ConfigError(
            f"hotkey {keypair.ss58_address} has no private key on this machine and can't sign: check --wallet.path, "
            "--wallet.name and --wallet.hotkey"
        ) from None


def verify(hotkey: str, message: bytes, signature: bytes) -> bool:
    """Return whether the owner of the address ``hotkey`` signed ``message``; False for malformed signatures."""
    try:
        return any(Keypair(ss58_address=hotkey, crypto_type=kind).verify(message, signature) for kind in CRYPTO_TYPES)
    except ValueError:
        return False  # wrong length, or not an address


def hotkey_file(wallet_path: str | Path, wallet_name: str, hotkey: str) -> Path:
    """Return the path of a hotkey's file in a wallet."""
    return expanded(Path(wallet_path), "--wallet.path") / wallet_name / "hotkeys" / hotkey


def load_hotkey(wallet_path: str | Path, wallet_name: str, hotkey: str) -> Keypair:
    """Load a hotkey from its file, which must not have a password.

    Raises:
        ConfigError: there is no such file, or it holds no key.
    """
    path = hotkey_file(wallet_path, wallet_name, hotkey)
    try:
        return bittensor_core.deserialize_keypair_from_keyfile_data(path.read_bytes())
    except (OSError, ValueError, KeyfileError) as error:
        # An unreadable file may contain key material, so name only the kind of failure.
        raise ConfigError(
            f"no hotkey in {path} ({type(error).__name__}): check --wallet.path, --wallet.name, --wallet.hotkey, and "
            "that it has no password"
        ) from None


def save_hotkey(wallet_path: str | Path, wallet_name: str, hotkey: str, keypair: Keypair) -> None:
    """Write a hotkey's file, with its private key and no password, in the format of ``load_hotkey`` and wallets."""
    path = hotkey_file(wallet_path, wallet_name, hotkey)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(bittensor_core.serialized_keypair_to_keyfile_data(keypair))

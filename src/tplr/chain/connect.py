"""Opens the chain of ``--subtensor.network`` and ``--wallet.*``."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tplr.chain.base import Chain
from tplr.errors import ConfigError
from tplr.files import atomic_write

LOCAL_PREFIX = "local:"


@asynccontextmanager
async def open_chain(
    network: str,
    *,
    netuid: int,
    wallet_path: str | Path,
    wallet_name: str,
    hotkey: str,
    archive: Sequence[str] = (),
) -> AsyncIterator[Chain]:
    """An open chain, accessed by one hotkey; closed at the end.

    Args:
        network: ``local:<file>`` for a chain file, else a network's name (``finney``, ``test``) or a node's URL.
        hotkey: name of the hotkey's file in the wallet.
        archive: URLs of nodes that keep old state. Any value opens a chain file as an archive.

    Raises:
        ConfigError: there is no such hotkey, or the chain file holds another subnet.
        ChainUnavailable: the chain can't be reached.
    """
    if network.startswith(LOCAL_PREFIX):
        from tplr.chain.local import LocalChain

        address = await asyncio.to_thread(load_local_hotkey, wallet_path, wallet_name, hotkey)
        chain = LocalChain(network.removeprefix(LOCAL_PREFIX), address, netuid=netuid, archive=bool(archive))
    else:
        from tplr.chain.subtensor import SubtensorChain

        chain = await SubtensorChain.open(
            network, netuid=netuid, wallet_path=wallet_path, wallet_name=wallet_name, hotkey=hotkey, archive=archive
        )
    try:
        yield chain
    finally:
        await chain.close()


def hotkey_file(wallet_path: str | Path, wallet_name: str, hotkey: str) -> Path:
    """Path of a hotkey's file in a wallet."""
    return Path(wallet_path).expanduser() / wallet_name / "hotkeys" / hotkey


def load_local_hotkey(wallet_path: str | Path, wallet_name: str, hotkey: str) -> str:
    """Address of a hotkey, from the file and field of a real wallet; secrets are not read.

    Raises:
        ConfigError: there is no such file, or it holds no address.
    """
    path = hotkey_file(wallet_path, wallet_name, hotkey)
    try:
        address = json.loads(path.read_text())["ss58Address"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        # An unreadable file may hold key material: name only the kind of failure.
        raise ConfigError(
            f"no hotkey address in {path} ({type(error).__name__}): check --wallet.path, --wallet.name and "
            "--wallet.hotkey"
        ) from None
    if not isinstance(address, str) or not address:
        raise ConfigError(f"{path}: ss58Address is empty")
    return address


def save_local_hotkey(wallet_path: str | Path, wallet_name: str, hotkey: str, address: str) -> None:
    """Write the hotkey file of a localnet's node: an address without a key, for ``load_local_hotkey``."""
    atomic_write(hotkey_file(wallet_path, wallet_name, hotkey), json.dumps({"ss58Address": address}).encode())

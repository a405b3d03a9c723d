"""Opens the chain of ``--subtensor.network`` and ``--wallet.*``."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tplr.chain.base import Chain
from tplr.chain.hotkeys import load_hotkey, new_hotkey
from tplr.errors import OtherChain

LOCAL_PREFIX = "local:"


def check_network(network: str, archive: Sequence[str] = ()) -> None:
    """Raise ConfigError if ``network`` or ``archive`` of ``open_chain`` can't be right; connects to nothing."""
    if not network.startswith(LOCAL_PREFIX):
        from tplr.chain.subtensor import endpoints_of  # bittensor takes seconds to import

        endpoints_of(network, archive)


@asynccontextmanager
async def open_chain(
    network: str,
    *,
    netuid: int,
    wallet_path: str | Path,
    wallet_name: str,
    hotkey: str | None,
    archive: Sequence[str] = (),
    genesis: str | None = None,
) -> AsyncIterator[Chain]:
    """Open a chain for one hotkey; it is closed when the block ends.

    Args:
        network: ``local:<file>`` for a chain file, else a network's name (``finney``, ``test``) or a node's URL.
        hotkey: name of the hotkey's file in the wallet; None for read-only access without a hotkey.
        archive: URLs of nodes that keep old state. Any value opens a chain file as an archive.
        genesis: hash of block 0 that the chain must have, 0x-hex; None accepts any.

    Raises:
        ConfigError: there is no such hotkey, the chain file holds another subnet, or the nodes serve several chains.
        OtherChain: all that answer serve another chain than ``genesis``.
        ChainUnavailable: the chain can't be reached.
    """
    if network.startswith(LOCAL_PREFIX):
        from tplr.chain.local import LocalChain

        if hotkey is None:
            key = new_hotkey().ss58_address
        else:
            key = await asyncio.to_thread(load_hotkey, wallet_path, wallet_name, hotkey)
        chain = LocalChain(network.removeprefix(LOCAL_PREFIX), key, netuid=netuid, archive=bool(archive))
        if genesis and genesis != chain.genesis:
            await chain.close()
            raise OtherChain(chain.genesis, genesis)
    else:
        from tplr.chain.subtensor import SubtensorChain

        chain = await SubtensorChain.open(
            network,
            netuid=netuid,
            wallet_path=wallet_path,
            wallet_name=wallet_name,
            hotkey=hotkey,
            archive=archive,
            genesis=genesis,
        )
    try:
        yield chain
    finally:
        await chain.close()

"""The nodes of a network: which ones there are, and a connection to the first that answers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import bittensor as bt
from bittensor.settings import (
    ARCHIVE_ENDPOINTS,
    FALLBACK_ENDPOINTS,
    FINNEY_GENESIS_HASH,
    NETWORKS,
    default_archive_endpoints,
    default_fallback_endpoints,
    resolve_endpoint,
)

from tplr.chain.follow import within
from tplr.chain.subtensor.pauses import EndpointPauses
from tplr.chain.subtensor.sdk import SDK_ERRORS, owned, translate
from tplr.errors import ChainError, ChainUnavailable, ConfigError, OtherChain, UnsupportedRuntime
from tplr.urls import origin

logger = logging.getLogger(__name__)

# A connection is awaited for DIAL_SECONDS if there are several nodes, else for ONLY_DIAL_SECONDS; the answer of a
# connected node for PROBE_SECONDS.
DIAL_SECONDS, ONLY_DIAL_SECONDS, PROBE_SECONDS = 9.0, 30.0, 5.0
HEAD_START_SECONDS = 2.0  # from dialling one node to dialling the next
# The SDK knows the genesis of no other network.
MAIN_NETWORK_URLS = {
    url
    for name in ("finney", "archive")
    for url in (NETWORKS[name], *FALLBACK_ENDPOINTS.get(name, ()), *ARCHIVE_ENDPOINTS.get(name, ()))
}


class EndpointHead(NamedTuple):
    """The newest block of a chain node, the Unix time in it, and the hash of the node's block 0, 0x-hex."""

    number: int
    time: float
    genesis: str


class Connection(bt.RpcSubstrate):
    """A connection that keeps the pauses that endpoints ask for.

    It leaves no socket open when a dial is cancelled: the SDK loses the one that is being opened.
    ``close`` closes it, and a read that dials an archive closes that one when it ends without it.
    """

    def __init__(self, url: str, archive: Sequence[str], pauses: EndpointPauses) -> None:
        super().__init__(url, archive_endpoints=list(archive))
        self._pauses = pauses
        self._sockets: list[Any] = []

    def _interface(self, endpoint: str, fallbacks: list[str]) -> Any:
        opened = super()._interface(endpoint, fallbacks)
        self._pauses.guard(opened._session)
        self._sockets.append(opened)
        return opened

    async def _archive(self) -> Any:
        try:
            return await super()._archive()
        finally:
            if not self._archive_lock.locked():  # else another read dials
                for lost in [one for one in self._sockets if one not in (self._substrate, self._archive_substrate)]:
                    await lost.close()
                    self._sockets = [one for one in self._sockets if one is not lost]

    async def close(self) -> None:
        await super().close()
        while self._sockets:
            await self._sockets.pop().close()


async def probe_endpoints(network: str, archive: Sequence[str] = ()) -> list[tuple[str, EndpointHead | str]]:
    """Ask all nodes of ``network`` and ``archive`` concurrently; arguments as in ``SubtensorChain.open``.

    Returns:
        For each node, in order: its scheme and host, and its head or the reason why there is none.

    Raises:
        ConfigError: there is no such network, or a URL is not one of a node.
    """
    found = endpoints_of(network, archive)
    urls = list(dict.fromkeys([*found.nodes, *(found.archives if archive else ())]))
    answers = await asyncio.gather(*(_probe(url, found.genesis) for url in urls))
    return list(zip(map(origin, urls), answers, strict=True))


async def _probe(url: str, genesis: str | None) -> EndpointHead | str:
    try:
        substrate = await _dial(url, (), DIAL_SECONDS, genesis, EndpointPauses())
    except (ChainError, UnsupportedRuntime) as error:
        return str(error)
    try:
        client = bt.Client(substrate=substrate)  # type: ignore[arg-type] - as in ``SubtensorChain.open``
        number = await newest_block(client)
        time = await within(PROBE_SECONDS, owned(client.timestamp(block=number)))
        return EndpointHead(number, time.timestamp(), await within(PROBE_SECONDS, owned(substrate.block_hash(0))))
    except SDK_ERRORS as error:
        return str(translate(error, sent=False))
    finally:
        await close(substrate)


class Endpoints(NamedTuple):
    """URLs of nodes to connect to, in this order, and of archives.

    ``genesis`` is the hash of their block 0, 0x-hex; None if the network is not a known one.
    """

    nodes: list[str]
    archives: list[str]
    genesis: str | None


def endpoints_of(network: str, archive: Sequence[str] = ()) -> Endpoints:
    """Return the endpoints of ``--subtensor.network`` and ``--subtensor.archive``. Raises ConfigError."""
    for url in archive:
        _check_url(url, "--subtensor.archive")
    nodes, own_archives = _nodes_of(network)
    # One known node is enough: all are of one network.
    known = not MAIN_NETWORK_URLS.isdisjoint(nodes)
    return Endpoints(nodes, list(archive) or own_archives, FINNEY_GENESIS_HASH if known else None)


def _nodes_of(network: str) -> tuple[list[str], list[str]]:
    """Return the URLs of a network's nodes, and of its own archives."""
    if "://" in network:
        urls = [url.strip() for url in network.split(",")]
        for url in urls:
            _check_url(url, "--subtensor.network")
        return urls, default_archive_endpoints(network)
    try:
        name, endpoint = resolve_endpoint(network)
    except ValueError as error:
        raise ConfigError(f"--subtensor.network {network}: {error}") from error
    fallbacks = [url for url in default_fallback_endpoints(name) if url != endpoint]
    return [endpoint, *fallbacks], default_archive_endpoints(name)


def _check_url(url: str, argument: str) -> None:
    """Raise ConfigError unless a websocket can be opened to ``url``: the library's own errors contain all of it."""
    with suppress(ValueError):
        parts = urlsplit(url)
        credentials = (parts.username is None) == (parts.password is None)
        if parts.scheme in ("ws", "wss") and parts.hostname and parts.port != 0 and credentials and not parts.fragment:
            return
    raise ConfigError(f"{argument}: {origin(url)} is not the URL of a node: expected wss://host or wss://host:port")


async def dial_any(
    endpoints: Sequence[str], archive: Sequence[str], genesis: str | None, pauses: EndpointPauses
) -> tuple[bt.RpcSubstrate, list[str]]:
    """Return a connection to the first node that accepts one, and the endpoints with that node first.

    Each node is dialled when the previous one has failed, or has not answered for ``HEAD_START_SECONDS``.

    Args:
        genesis: hash of block 0, 0x-hex, that the node must have; None accepts any.
        pauses: nodes that have asked for one are not dialled, and those that ask for one now are noted.

    Raises:
        ChainUnavailable: no node accepts a connection; its ``retry_after`` is the shortest pause of all nodes.
    """
    seconds = DIAL_SECONDS if len(endpoints) > 1 else ONLY_DIAL_SECONDS
    waiting = [[*endpoints[turn:], *endpoints[:turn]] for turn in range(len(endpoints))]
    dialling: dict[asyncio.Task[bt.RpcSubstrate], list[str]] = {}
    failed: list[ChainError | UnsupportedRuntime] = []
    try:
        while waiting or dialling:
            if waiting:
                rotated = waiting.pop(0)
                dialling[asyncio.create_task(_dial(rotated[0], archive, seconds, genesis, pauses))] = rotated
            patience = HEAD_START_SECONDS if waiting else None
            ended, _ = await asyncio.wait(dialling, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in dialling if task in ended]:
                if (error := task.exception()) is None:
                    return task.result(), dialling.pop(task)
                rotated = dialling.pop(task)
                if not isinstance(error, ChainError | UnsupportedRuntime):
                    raise error
                failed.append(error)
                if pauses.is_news(rotated[0]):
                    logger.warning("%s can't be reached: %s", origin(rotated[0]), error)
    finally:
        for task in dialling:
            task.cancel()
        for late in await asyncio.gather(*dialling, return_exceptions=True):
            if isinstance(late, bt.RpcSubstrate):  # it connected at the same time
                await close(late)
    # A node that does not answer now may serve the runtime, or the chain, that another one lacks.
    passing = [error for error in failed if isinstance(error, ChainError)]
    raise min(passing, key=_waiting, default=failed[0])


def _waiting(error: ChainError) -> tuple[bool, float]:
    """Sort errors by whether and when another try may succeed."""
    return isinstance(error, OtherChain), error.retry_after if isinstance(error, ChainUnavailable) else 0.0


async def check_same_chain(endpoints: Sequence[str], genesis: str, pauses: EndpointPauses) -> None:
    """Raise ConfigError if one of the endpoints after the first, which has ``genesis``, serves another chain.

    An endpoint that does not answer within ``PROBE_SECONDS`` is checked when it is dialled.
    """

    async def ask(url: str) -> str:
        try:
            await close(await _dial(url, (), PROBE_SECONDS, genesis, pauses))
        except OtherChain as error:
            return f"--subtensor.network: {origin(endpoints[0])} serves the chain with genesis {genesis}, " + (
                f"{origin(url)} that with {error.found}: remove the wrong one"
            )
        except (ChainError, UnsupportedRuntime) as error:
            if pauses.is_news(url):
                logger.warning("%s can't be reached: %s", origin(url), error)
        return ""

    if problems := [said for said in await asyncio.gather(*map(ask, endpoints[1:])) if said]:
        raise ConfigError(problems)


async def _dial(
    url: str, archive: Sequence[str], seconds: float, genesis: str | None, pauses: EndpointPauses
) -> bt.RpcSubstrate:
    """Return a connection to one node. Raises as ``translate``, and OtherChain for another chain's node.

    The SDK knows no other node: it would switch to one without asking which chain and which final block that one has.
    """
    substrate = Connection(url, archive, pauses)
    async with closed_if_it_fails(substrate):
        await within(seconds, owned(substrate.connect()))
        if genesis and (found := await within(PROBE_SECONDS, owned(substrate.block_hash(0)))) != genesis:
            raise OtherChain(found, genesis)
    return substrate


async def newest_block(client: bt.Client) -> int:
    """Return a connected node's newest block. Raises one of ``SDK_ERRORS``; TimeoutError after PROBE_SECONDS."""
    return await within(PROBE_SECONDS, owned(client.block()))


@asynccontextmanager
async def closed_if_it_fails(connection: bt.RpcSubstrate) -> AsyncIterator[None]:
    """Close the connection if the block raises; an error of the SDK is raised as ``translate`` returns it."""
    try:
        yield
    except SDK_ERRORS as error:
        await close(connection)
        raise translate(error, sent=False) from error
    except BaseException:
        await close(connection)
        raise


async def close(connection: bt.RpcSubstrate | bt.Client) -> None:
    with suppress(TimeoutError):
        await within(PROBE_SECONDS, connection.close())

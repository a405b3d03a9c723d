"""``Chain`` on a real subtensor node: the only file that imports bittensor (11.3).

Every call has a deadline, and every error of the SDK is translated to one of ours. A failed read may be retried. A
write that failed without an error of the chain may have been included (``fate_unknown``): the SDK never retries it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import bittensor as bt
import bittensor_core
from bittensor.intents.weights import DEFAULT_COMMIT_REVEAL_VERSION, clip_to_max_weight
from bittensor.keyfiles import KeyfileError
from bittensor.settings import default_archive_endpoints, default_fallback_endpoints, resolve_endpoint

from tplr.chain import hotkeys, rules
from tplr.chain.base import Block, Commitment, Metagraph, Neuron
from tplr.chain.follow import follow, within
from tplr.errors import (
    ChainError,
    ChainUnavailable,
    ConfigError,
    NotPermitted,
    NotRegistered,
    RateLimited,
    Rejected,
    UnsupportedRuntime,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)
# At DEBUG the SDK logs every frame, commitments included.
logging.getLogger("bittensor.transport.raw_websocket").setLevel(logging.INFO)

READ_SECONDS = 30.0
# Signing and the pool take seconds; the rest of the time is for one or two blocks.
WRITE_SECONDS = 60.0
WRITE_BLOCKS = 10
# A node that sends nothing for QUIET_SECONDS is asked for its head. If it does not answer within PROBE_SECONDS, another
# node is dialled, for at most DIAL_SECONDS if there are several.
QUIET_SECONDS, PROBE_SECONDS, DIAL_SECONDS = 4.0, 5.0, 9.0
HEAD_START_SECONDS = 2.0  # from dialling one node to dialling the next
RAO_PER_ALPHA = 1e9

# Errors that the SDK raises; a storage item that the runtime lacks is a ValueError.
SDK_ERRORS = (bt.BittensorError, ValueError, OSError, TimeoutError)
# Errors of the pool about the extrinsic (nonce, age, priority), not the call: it may be included or sent again.
PASSING = frozenset(
    {
        "AlreadyImported",
        "AncientBirthBlock",
        "Dropped",
        "ExhaustsResources",
        "FinalityTimeout",
        "Future",
        "Invalid",
        "PriorityTooLow",
        "Retracted",
        "Stale",
        "Usurped",
    }
)
# Texts of the SDK's ValueErrors about something that the connected runtime lacks.
LACKING = ("not found in registry", "not found in this runtime", "this runtime does not declare")
# Names for failed reads that the SDK raises without a name, by their text.
NAMELESS = {"State discarded": "StateDiscarded", "no block at height": "UnknownBlock"}
BY_CODE: dict[bt.ErrorCode, type[ChainError]] = {
    bt.ErrorCode.NOT_REGISTERED: NotRegistered,
    bt.ErrorCode.RATE_LIMITED: RateLimited,
    bt.ErrorCode.NOT_AUTHORIZED: NotPermitted,
    bt.ErrorCode.INSUFFICIENT_BALANCE: NotPermitted,
    bt.ErrorCode.INVALID_ARGUMENT: Rejected,
}


def translate(error: Exception, *, sent: bool) -> ChainError | UnsupportedRuntime:
    """Translate an SDK error to one of ours: by the chain's name, then by code, else to ChainUnavailable.

    Args:
        sent: the call may have reached a node before it failed.
    """
    if isinstance(error, bt.ChainError):
        name = error.name or ""
        if name in rules.ERRORS:
            return rules.refusal(name, error.message)
        if name not in PASSING:
            if error.code in BY_CODE:
                return BY_CODE[error.code](error.message, name=name)
            if name:
                return Rejected(f"{name}: {error.message}", name=name)
        if not name:
            name = next((ours for words, ours in NAMELESS.items() if words in error.message), "")
        advice = ": ask a node that keeps it (--subtensor.archive)" if name == "StateDiscarded" else ""
        return ChainUnavailable(f"{name or 'no answer'}: {error.message}{advice}", name=name, fate_unknown=sent)
    if type(error) is bt.BittensorError:
        # The SDK's argument checks raise this base class, before anything is sent.
        return Rejected(str(error), name="InvalidArgument")
    return _translate(error, sent=sent)


def _translate(error: Exception, *, sent: bool) -> ChainUnavailable | UnsupportedRuntime:
    """Translate an error that is not the chain's: the runtime lacks something, or there was no answer."""
    detail = str(error) or "no answer in time"
    if type(error).__name__ == "StorageFunctionNotFound" or any(words in detail for words in LACKING):
        return UnsupportedRuntime(
            f"the chain's runtime lacks something that tplr needs: {detail}: update tplr and bittensor "
            f"({bt.__version__} is installed), or check --subtensor.network"
        )
    # The SDK raises ValueError while it composes a call, before anything is sent.
    unknown = sent and not isinstance(error, ValueError)
    return ChainUnavailable(f"{type(error).__name__}: {detail}", name=type(error).__name__, fate_unknown=unknown)


class SubtensorChain:
    """One hotkey's access to a subnet through the SDK. Created by ``open``; bound to the loop that opened it.

    Args:
        substrate: a connected ``bt.RpcSubstrate`` or other ``bt.Substrate``.
        endpoints: URLs to switch to, in this order, if the node does not answer; the first is the present one.
        archive: URLs of nodes that keep old state.
    """

    def __init__(
        self,
        substrate: bt.Substrate,
        wallet: bt.Wallet,
        *,
        netuid: int,
        hotkey: str,
        block_time: float,
        endpoints: Sequence[str] = (),
        archive: Sequence[str] = (),
    ) -> None:
        self.netuid = netuid
        self.hotkey = hotkey
        self.block_time = block_time
        self._endpoints = list(endpoints)
        self._archive = list(archive)
        self._wallet = wallet
        # The SDK caches nonces, so only one write at a time per hotkey.
        self._writing = asyncio.Lock()
        self._dialling = asyncio.Lock()
        self._use(substrate)

    @classmethod
    async def open(
        cls,
        network: str,
        *,
        netuid: int,
        wallet_path: str | Path,
        wallet_name: str,
        hotkey: str | None,
        archive: Sequence[str] = (),
    ) -> Self:
        """Connect to a network by name (``finney``, ``test``) or to nodes by URL.

        Args:
            network: a name, or URLs separated by commas: the first one, then fallbacks.
            hotkey: None for read-only access without a hotkey.
            archive: URLs of nodes that keep old state; default: those of a named network.

        Raises:
            ConfigError: there is no such network or hotkey.
            ChainUnavailable: no node answers.
        """
        wallet = bt.Wallet(wallet_name, hotkey or "default", str(wallet_path))
        try:
            own = await asyncio.to_thread(lambda: wallet.hotkey) if hotkey is not None else hotkeys.new_hotkey()
        except (OSError, ValueError, KeyfileError) as error:
            raise ConfigError(
                f"hotkey {hotkey!r} of wallet {wallet_name!r} in {wallet_path}: {error}: check --wallet.path, "
                "--wallet.name, --wallet.hotkey, and that the hotkey has no password"
            ) from error
        endpoints, own_archive = _endpoints(network)
        archive = list(archive) or own_archive
        substrate, endpoints = await _dial_any(endpoints, archive)
        try:
            block_time = await within(READ_SECONDS, substrate.block_time())
        except SDK_ERRORS as error:
            await _close(substrate)
            raise translate(error, sent=False) from error
        except BaseException:
            await _close(substrate)
            raise
        return cls(
            substrate,  # type: ignore[arg-type] - the SDK's protocol lacks a return type that its own class has
            wallet,
            netuid=netuid,
            hotkey=own.ss58_address,
            block_time=block_time,
            endpoints=endpoints,
            archive=archive,
        )

    async def head(self) -> int:
        return await self._read(self._client.block())

    def blocks(self) -> AsyncGenerator[int, None]:
        return follow(self._subscribe, self._recover, block_time=self.block_time)

    async def block(self, number: int) -> Block:
        if number > self._final:
            self._final = max(self._final, await self._read(self._client.finalized_block()))
        if number > self._final:
            head = await self.head()
            if number > head:
                raise ChainUnavailable(f"there is no block {number}; the head is {head}", name="UnknownBlock")
            raise ChainUnavailable(f"block {number} is not final yet; the last is {self._final}", name="NotFinal")
        block_hash = await self._read(self._substrate.block_hash(number))
        time = await self._read(self._client.timestamp(block=number))
        return Block(number, block_hash, time.timestamp())

    async def metagraph(self, block: int | None = None) -> Metagraph:
        found = await self._read(self._client.subnets.metagraph(self.netuid, block=block, commitments=False))
        if found is None:
            raise rules.refusal("SubnetNotExists", f"there is no subnet {self.netuid}: check --netuid")
        return Metagraph(
            found.block,
            tuple(
                Neuron(
                    uid=neuron.uid,
                    hotkey=neuron.hotkey,
                    coldkey=neuron.coldkey,
                    # ``.tao`` raises on balances in alpha.
                    stake=neuron.total_stake.rao / RAO_PER_ALPHA,
                    permit=neuron.validator_permit,
                    last_update=neuron.last_update,
                    incentive=neuron.incentive,
                )
                for neuron in found.neurons
            ),
        )

    async def commitments(self, block: int | None = None) -> dict[str, Commitment]:
        found = await self._read(self._client.subnets.commitments(self.netuid, block=block))
        return {hotkey: Commitment(hotkey, entry.block, entry.data) for hotkey, entry in sorted(found.items())}

    async def weights(self, block: int | None = None) -> dict[int, dict[int, float]]:
        rows = await self._read(self._client.weights.weights(netuid=self.netuid, block=block))
        return {uid: row for uid, row in rows.items() if row}

    async def commit(self, data: str) -> int:
        raw = data.encode()
        rules.check_commitment_size(raw)
        # The variant's name is the length.
        call = bt.calls.Commitments.set_commitment(
            netuid=self.netuid, info={"fields": [{f"Raw{len(raw)}": "0x" + raw.hex()}]}
        )
        try:
            return await self._submit(call)
        except RateLimited as error:
            raise await self._with_retry_block(error) from error

    async def set_weights(self, weights: Mapping[int, float]) -> int:
        rules.quantize_weights(weights)  # raises the errors with which the SDK would refuse, by name
        version = await self._read(self._query("WeightsVersionKey")) or 0
        intent = bt.SetWeights(netuid=self.netuid, weights=dict(weights), version_key=version)
        try:
            return await self._write(self._client.execute(intent, self._wallet, wait_for_finalization=False, retries=2))
        except UnsupportedRuntime:
            # The intent reads storage that exists since about spec 474.
            logger.debug("the runtime does not serve the SDK's SetWeights", exc_info=True)
        call = await self._read(self._weights_call(weights, version))
        return await self._submit(call)

    def sign(self, message: bytes) -> bytes:
        return hotkeys.sign(self._wallet.hotkey, message)

    async def close(self) -> None:
        await _close(self._client)

    # Weights for runtimes that the SDK's intent does not serve

    async def _weights_call(self, weights: Mapping[int, float], version: int) -> Any:
        """Compose the call that ``bt.SetWeights`` would send: plain, or sealed if the subnet requires it."""
        uid = await self._substrate.query("SubtensorModule", "Uids", [self.netuid, self.hotkey])
        own_only = [to for to, weight in weights.items() if weight > 0] == [uid]
        limit = await self._query("MaxWeightsLimit")
        if limit is not None and limit < rules.U16_MAX and not own_only:
            clipped = clip_to_max_weight(list(weights.values()), limit / rules.U16_MAX)
            weights = dict(zip(weights, clipped, strict=True))
        row = rules.quantize_weights(weights)
        needed = await self._query("MinAllowedWeights") or 0
        if len(row) < needed and not own_only:
            # The chain would detect this in sealed weights only when it opens them.
            raise rules.refusal("WeightVecLengthIsLow", f"{len(row)} uids with weight, at least {needed} are needed")
        uids, values = [to for to, _ in row], [value for _, value in row]
        calls = bt.calls.SubtensorModule
        if not await self._query("CommitRevealWeightsEnabled"):
            return calls.set_mechanism_weights(
                netuid=self.netuid, mecid=0, dests=uids, weights=values, version_key=version
            )
        sealed, reveal_round = await self._seal(uids, values, version)
        return calls.commit_timelocked_mechanism_weights(
            netuid=self.netuid,
            mecid=0,
            commit=sealed,
            reveal_round=reveal_round,
            commit_reveal_version=DEFAULT_COMMIT_REVEAL_VERSION,
        )

    async def _seal(self, uids: list[int], values: list[int], version: int) -> tuple[bytes, int]:
        """Return sealed weights, and the drand round of the epoch that opens them."""
        head = await self._substrate.block_number()
        at = await self._substrate.block_hash(head)
        items = ("Tempo", "RevealPeriodEpochs", "LastEpochBlock", "PendingEpochAt", "SubnetEpochIndex")
        tempo, period, last_epoch, pending, index = [await self._query(item, at) or 0 for item in items]
        return await asyncio.to_thread(
            bittensor_core.get_encrypted_commit_v2,
            uids=uids,
            weights=values,
            version_key=version,
            last_epoch_block=last_epoch,
            pending_epoch_at=pending,
            subnet_epoch_index=index,
            tempo=tempo,
            blocks_since_last_step=await self._query("BlocksSinceLastStep", at) or 0,
            current_block=head,
            subnet_reveal_period_epochs=period,
            block_time=self.block_time,
            hotkey=self._wallet.hotkey.public_key,
        )

    async def _query(self, item: str, block_hash: str | None = None) -> Any:
        return await self._substrate.query("SubtensorModule", item, [self.netuid], block_hash)

    # The connection

    def _use(self, substrate: bt.Substrate) -> None:
        self._substrate = substrate
        self._client = bt.Client(substrate=substrate)
        self._final = -1  # the last final block, as this node has said

    async def _subscribe(self) -> AsyncGenerator[int, None]:
        try:
            async with aclosing(self._client.blocks()) as headers:  # type: ignore[type-var]
                while True:
                    yield (await self._watched(anext(headers))).number
        except StopAsyncIteration:
            return
        except SDK_ERRORS as error:
            raise translate(error, sent=False) from error

    async def _recover(self, last: int | None) -> None:
        """Switch to another node unless the present one has newer blocks."""
        client = self._client
        try:
            head = await within(PROBE_SECONDS, _owned(client.block()))
        except SDK_ERRORS as error:
            logger.warning("%s does not answer: %s", self._node, translate(error, sent=False))
        else:
            if last is None or head > last:
                return
            logger.warning("%s is stuck at block %d", self._node, head)
            if len(self._endpoints) < 2:
                return
        with suppress(ChainUnavailable):
            await self._dial_next(client)

    async def _watched(self, call: Awaitable[T]) -> T:
        """Await ``call`` while the node is alive: after a silence it must return its head. Raises ChainUnavailable."""
        client, task = self._client, asyncio.ensure_future(_owned(call))
        try:
            while not (await asyncio.wait({task}, timeout=QUIET_SECONDS))[0]:
                try:
                    await within(PROBE_SECONDS, _owned(client.block()))
                except SDK_ERRORS as error:
                    mute = self._node
                    await self._dial_next(client)
                    raise ChainUnavailable(f"{mute} does not answer: switched to {self._node}", name="Mute") from error
            return task.result()
        finally:
            task.cancel()

    async def _dial_next(self, silent: bt.Client) -> None:
        """Connect to another node, or to the only one again; close the ``silent`` client only after that.

        Raises:
            ChainUnavailable: no node could be reached; the client is kept, and dials again at its next call.
        """
        async with self._dialling:
            if self._client is not silent or not self._endpoints:
                return
            substrate, self._endpoints = await _dial_any([*self._endpoints[1:], self._endpoints[0]], self._archive)
            self._use(substrate)  # type: ignore[arg-type]
            await _close(silent)

    @property
    def _node(self) -> str:
        return _origin(self._endpoints[0]) if self._endpoints else "the node"

    async def _read(self, call: Awaitable[T]) -> T:
        try:
            return await within(READ_SECONDS, self._watched(call))
        except SDK_ERRORS as error:
            raise translate(error, sent=False) from error

    async def _with_retry_block(self, error: RateLimited) -> RateLimited:
        """Return ``error`` with the block at which the quota of commitments is reset: the next epoch's first block.

        Older runtimes limit commitments by time, under another name; that error is returned unchanged.
        """
        if error.name != "SpaceLimitExceeded":
            return error
        tempo = await self._read(self._query("Tempo"))
        if last := await self._read(self._query("LastEpochBlock")):
            following = last + tempo + 1
        else:
            limits = rules.ChainLimits(tempo=tempo)
            following = rules.epoch_start(
                rules.epoch_of(await self.head(), limits, self.netuid) + 1, limits, self.netuid
            )
        return RateLimited(f"{error}; retry at block {following}", name=error.name, retry_at=following)

    async def _submit(self, call: Any) -> int:
        """Sign a call and send it. Returns as ``_write``."""
        sending = self._client.submit_call(call, self._wallet, signer="hotkey", wait_for_finalization=False)
        return await self._write(sending)

    async def _write(self, call: Awaitable[bt.ExtrinsicResult]) -> int:
        """Send a call and return its block of inclusion. Cancelling does not withdraw the call."""
        async with self._writing:
            self._forget_nonce()
            try:
                result = await within(WRITE_SECONDS + WRITE_BLOCKS * self.block_time, _owned(call))
                result = result.raise_for_failure()
            except SDK_ERRORS as error:
                raise translate(error, sent=True) from error
        if result.extrinsic_id is None:
            raise ChainUnavailable("sent, but the node did not report its block", fate_unknown=True)
        return int(result.extrinsic_id.split("-")[0])

    def _forget_nonce(self) -> None:
        """Clear the SDK's nonce: it would continue after an abandoned call, for which the pool would wait forever."""
        if isinstance(self._substrate, bt.RpcSubstrate):
            with suppress(bt.ConnectionNotReady):
                self._substrate.raw.clear_nonce_cache_for_account(self.hotkey)


class EndpointHead(NamedTuple):
    """The newest block of a chain node, and the Unix time in it."""

    number: int
    time: float


async def probe_endpoints(network: str, archive: Sequence[str] = ()) -> list[tuple[str, EndpointHead | str]]:
    """Ask all nodes of ``network`` and ``archive`` concurrently; arguments as in ``SubtensorChain.open``.

    Returns:
        For each node, in order: its scheme and host, and its head or the reason why there is none.

    Raises:
        ConfigError: there is no such network.
    """
    urls = list(dict.fromkeys([*_endpoints(network).nodes, *archive]))
    return list(zip(map(_origin, urls), await asyncio.gather(*map(_probe, urls)), strict=True))


async def _probe(url: str) -> EndpointHead | str:
    substrate = _substrate([url], [])
    try:
        client = bt.Client(substrate=substrate)  # type: ignore[arg-type] - as in ``open``
        await within(DIAL_SECONDS, _owned(substrate.connect()))
        number = await within(PROBE_SECONDS, _owned(client.block()))
        time = await within(PROBE_SECONDS, _owned(client.timestamp(block=number)))
        return EndpointHead(number, time.timestamp())
    except SDK_ERRORS as error:
        return str(translate(error, sent=False))
    finally:
        await _close(substrate)


class _Endpoints(NamedTuple):
    """URLs of nodes to connect to, in this order, and of archives."""

    nodes: list[str]
    archives: list[str]


def _endpoints(network: str) -> _Endpoints:
    """Return the endpoints of ``--subtensor.network``. Raises ConfigError."""
    if "://" in network:
        return _Endpoints([url.strip() for url in network.split(",")], default_archive_endpoints(network))
    try:
        name, endpoint = resolve_endpoint(network)
    except ValueError as error:
        raise ConfigError(f"--subtensor.network {network}: {error}") from error
    fallbacks = [url for url in default_fallback_endpoints(name) if url != endpoint]
    return _Endpoints([endpoint, *fallbacks], default_archive_endpoints(name))


def _substrate(endpoints: Sequence[str], archive: Sequence[str]) -> bt.RpcSubstrate:
    first, *others = endpoints
    return bt.RpcSubstrate(first, fallback_endpoints=others, archive_endpoints=list(archive))


async def _dial_any(endpoints: Sequence[str], archive: Sequence[str]) -> tuple[bt.RpcSubstrate, list[str]]:
    """Return a connection to the first node that accepts one, and the endpoints with that node first.

    Each node is dialled when the previous one has failed, or has not answered for ``HEAD_START_SECONDS``.

    Raises:
        ChainUnavailable: no node accepts a connection.
    """
    seconds = DIAL_SECONDS if len(endpoints) > 1 else READ_SECONDS
    waiting = [[*endpoints[turn:], *endpoints[:turn]] for turn in range(len(endpoints))]
    dialling: dict[asyncio.Task[bt.RpcSubstrate], list[str]] = {}
    failed = None
    try:
        while waiting or dialling:
            if waiting:
                rotated = waiting.pop(0)
                dialling[asyncio.create_task(_dial(rotated, archive, seconds))] = rotated
            patience = HEAD_START_SECONDS if waiting else None
            ended, _ = await asyncio.wait(dialling, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in dialling if task in ended]:
                if (error := task.exception()) is None:
                    return task.result(), dialling.pop(task)
                rotated = dialling.pop(task)
                if not isinstance(error, ChainError | UnsupportedRuntime):
                    raise error
                failed = error
                logger.warning("%s can't be reached: %s", _origin(rotated[0]), failed)
    finally:
        for task in dialling:
            task.cancel()
        for late in await asyncio.gather(*dialling, return_exceptions=True):
            if isinstance(late, bt.RpcSubstrate):  # it connected at the same time
                await _close(late)
    assert failed is not None
    raise failed


async def _dial(rotated: Sequence[str], archive: Sequence[str], seconds: float) -> bt.RpcSubstrate:
    """Return a connection to the first of ``rotated``. Raises as ``translate``."""
    substrate = _substrate(rotated, archive)
    try:
        await within(seconds, _owned(substrate.connect()))
    except SDK_ERRORS as error:
        await _close(substrate)
        raise translate(error, sent=False) from error
    except BaseException:
        await _close(substrate)
        raise
    return substrate


async def _owned(call: Awaitable[T]) -> T:
    """Await a call of the SDK, and retrieve the error of the connection that the SDK may open for it.

    The SDK never awaits the task of a connection, so asyncio would log each one that ends with an error. Its calls
    share the download of a runtime's metadata: if one of them is cancelled, the others would end as if they were, too.

    Raises:
        ConnectionError: another call was cancelled.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.sleep(0)  # the first step of the call opens the connection
        for session in asyncio.all_tasks():
            if session.get_name() == "rpc-session":
                session.remove_done_callback(_retrieve)  # a connection serves many calls, and needs one callback
                session.add_done_callback(_retrieve)
        return await task
    except (asyncio.CancelledError, asyncio.InvalidStateError) as error:
        if (this := asyncio.current_task()) and this.cancelling():
            raise
        raise ConnectionError("a call that shared a request with this one was cancelled") from error
    finally:
        task.cancel()


def _retrieve(ended: asyncio.Task[Any]) -> None:
    if not ended.cancelled():
        ended.exception()


async def _close(connection: bt.RpcSubstrate | bt.Client) -> None:
    with suppress(TimeoutError):
        await within(PROBE_SECONDS, connection.close())


def _origin(url: str) -> str:
    """Return only scheme and host, because an endpoint's path may contain an access key."""
    return "/".join(url.split("/")[:3])

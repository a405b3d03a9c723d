"""``Chain`` on a real subtensor node.

Every call has a deadline, and every error of the SDK is translated to one of ours. A failed read may be retried. A
write that failed without an error of the chain may have been included (``fate_unknown``): the SDK never retries it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import bittensor as bt
import bittensor_core
from bittensor.intents.weights import DEFAULT_COMMIT_REVEAL_VERSION, clip_to_max_weight
from bittensor.keyfiles import KeyfileError

from tplr.chain import hotkeys, rules
from tplr.chain.base import Block, Commitment, Metagraph, Neuron
from tplr.chain.follow import follow, within
from tplr.chain.subtensor.commitments import raw_text
from tplr.chain.subtensor.endpoints import (
    check_same_chain,
    close,
    closed_if_it_fails,
    dial_any,
    endpoints_of,
    newest_block,
)
from tplr.chain.subtensor.pauses import EndpointPauses
from tplr.chain.subtensor.sdk import SDK_ERRORS, owned, translate
from tplr.errors import ChainUnavailable, ConfigError, OtherChain, RateLimited, UnsupportedRuntime
from tplr.urls import origin

T = TypeVar("T")
logger = logging.getLogger(__name__)
# At DEBUG the SDK logs every frame, commitments included.
logging.getLogger("bittensor.transport.raw_websocket").setLevel(logging.INFO)

READ_SECONDS = 30.0
# Signing and the pool take seconds; the rest of the time is for one or two blocks.
WRITE_SECONDS = 60.0
WRITE_BLOCKS = 10
# A node that sends nothing for so long is asked for its newest block; if it does not answer, another node is dialled.
QUIET_SECONDS = 4.0
RAO_PER_ALPHA = 1e9


class SubtensorChain:
    """One hotkey's access to a subnet through the SDK. Created by ``open``; bound to the loop that opened it.

    Args:
        substrate: a connected ``bt.RpcSubstrate`` or other ``bt.Substrate``.
        endpoints: URLs to switch to, in this order, if the node does not answer; the first is the present one.
        archive: URLs of nodes that keep old state.
        pauses: those that the endpoints have asked for so far.
    """

    def __init__(
        self,
        substrate: bt.Substrate,
        wallet: bt.Wallet,
        *,
        genesis: str,
        netuid: int,
        hotkey: str,
        block_time: float,
        endpoints: Sequence[str] = (),
        archive: Sequence[str] = (),
        pauses: EndpointPauses | None = None,
    ) -> None:
        self.genesis = genesis
        self.netuid = netuid
        self.hotkey = hotkey
        self.block_time = block_time
        self._endpoints = list(endpoints)
        self._archive = list(archive)
        self._pauses = pauses or EndpointPauses()
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
        genesis: str | None = None,
    ) -> Self:
        """Connect to a network by name (``finney``, ``test``) or to nodes by URL.

        Args:
            network: a name, or URLs separated by commas: the first one, then fallbacks.
            hotkey: None for read-only access without a hotkey.
            archive: URLs of nodes that keep old state; default: those of a named network.
            genesis: hash of block 0 that the nodes must have, 0x-hex; default: that of a known network, else any.

        Raises:
            ConfigError: there is no such network or hotkey, a URL is not one of a node, or nodes of an unknown network
                serve different chains.
            OtherChain: all nodes that answer serve another chain than ``genesis``.
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
        found, pauses = endpoints_of(network, archive), EndpointPauses()
        if genesis and found.genesis and genesis != found.genesis:
            raise OtherChain(found.genesis, genesis)
        known = genesis or found.genesis
        substrate, endpoints = await dial_any(found.nodes, found.archives, known, pauses)
        async with closed_if_it_fails(substrate):
            # Dialling has compared a known genesis with the node's.
            genesis = known or await within(READ_SECONDS, substrate.block_hash(0))
            if known is None:
                await check_same_chain(endpoints, genesis, pauses)
            block_time = await within(READ_SECONDS, substrate.block_time())
        return cls(
            substrate,  # type: ignore[arg-type] - the SDK's protocol lacks a return type that its own class has
            wallet,
            genesis=genesis,
            netuid=netuid,
            hotkey=own.ss58_address,
            block_time=block_time,
            endpoints=endpoints,
            archive=found.archives,
            pauses=pauses,
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

    async def commitments(self, hotkeys: Collection[str], block: int | None = None) -> dict[str, Commitment]:
        # Not the SDK's own read. It reads every hotkey that ever committed, and also decodes what was revealed of
        # timelocked commitments: it fails as a whole if one hotkey revealed text that begins like a hexadecimal number.
        at = await self._read(self._substrate.block_hash(await self.head() if block is None else block))
        keys = [[self.netuid, hotkey] for hotkey in sorted(hotkeys)]
        records = await self._read(self._substrate.query_batch("Commitments", "CommitmentOf", keys, at))
        return {
            hotkey: Commitment(hotkey, int(record["block"]), raw_text(record["info"]["fields"]))
            for (_, hotkey), record in zip(keys, records, strict=True)
            if record is not None
        }

    async def weights(self, block: int | None = None) -> dict[int, dict[int, float]]:
        rows = await self._read(self._client.weights.weights(netuid=self.netuid, block=block))
        return {uid: row for uid, row in rows.items() if row}

    async def max_weight(self) -> float:
        limit = await self._read(self._query("MaxWeightsLimit"))
        return 1.0 if limit is None else limit / rules.U16_MAX

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
        await close(self._client)

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
            head = await newest_block(client)
        except SDK_ERRORS as error:
            if not self._endpoints or self._pauses.is_news(self._endpoints[0]):
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
        client, task = self._client, asyncio.ensure_future(owned(call))
        try:
            while not (await asyncio.wait({task}, timeout=QUIET_SECONDS))[0]:
                try:
                    await newest_block(client)
                except SDK_ERRORS as error:
                    if isinstance(error, bt.RpcPolicyError) and len(self._endpoints) < 2:
                        continue  # the node is alive, and its subscription goes on
                    await self._leave(client, error)
            try:
                return task.result()
            except bt.RpcConnectionError as error:
                if len(self._endpoints) < 2:
                    raise
                await self._leave(client, error)
        finally:
            task.cancel()

    async def _leave(self, client: bt.Client, error: Exception) -> NoReturn:
        """Switch to another node because of ``error``. Raises ChainUnavailable."""
        mute = self._node
        await self._dial_next(client)
        raise ChainUnavailable(f"{mute} does not answer: switched to {self._node}", name="Mute") from error

    async def _dial_next(self, silent: bt.Client) -> None:
        """Connect to another node, or to the only one again; close the ``silent`` client only after that.

        Raises:
            ChainUnavailable: no node could be reached; the client is kept, and dials again at its next call.
        """
        async with self._dialling:
            if self._client is not silent or not self._endpoints:
                return
            others = [*self._endpoints[1:], self._endpoints[0]]
            substrate, self._endpoints = await dial_any(others, self._archive, self.genesis, self._pauses)
            self._use(substrate)  # type: ignore[arg-type]
            await close(silent)

    @property
    def _node(self) -> str:
        return origin(self._endpoints[0]) if self._endpoints else "the node"

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
                result = await within(WRITE_SECONDS + WRITE_BLOCKS * self.block_time, owned(call))
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

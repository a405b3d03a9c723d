"""``Chain`` on a real subtensor node: the only file that imports bittensor (11.3).

Every call has a deadline, and every failure of the SDK leaves here as one of ours. A read that failed may be repeated;
a write that failed without the chain's own word for it may have landed (``fate_unknown``): the SDK never resends one.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Self, TypeVar

import bittensor as bt
from bittensor.keyfiles import KeyfileError
from bittensor.settings import default_archive_endpoints, default_fallback_endpoints, resolve_endpoint

from tplr.chain import rules
from tplr.chain.base import Block, Commitment, Metagraph, Neuron
from tplr.errors import ChainError, ChainUnavailable, ConfigError, NotPermitted, NotRegistered, RateLimited, Rejected

T = TypeVar("T")
logger = logging.getLogger(__name__)
# At DEBUG the SDK logs every frame, commitments included.
logging.getLogger("bittensor.transport.raw_websocket").setLevel(logging.INFO)

READ_SECONDS = 60.0
# Signing and the pool take seconds; the rest is waiting for a block or two.
WRITE_SECONDS = 60.0
WRITE_BLOCKS = 10
# A node that answers but makes no blocks is silent for ever: after so many block times, subscribe anew.
STALL_BLOCKS = 5
MAX_PAUSE_SECONDS = 60.0
RAO_PER_ALPHA = 1e9

# What can come up on this side of the SDK; a storage item that the runtime lacks is a ValueError.
SDK_ERRORS = (bt.BittensorError, ValueError, OSError, TimeoutError)
# Words of the pool about the envelope (nonce, age, priority), not about the call: it may land, or be sent again.
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
BY_CODE: dict[bt.ErrorCode, type[ChainError]] = {
    bt.ErrorCode.NOT_REGISTERED: NotRegistered,
    bt.ErrorCode.RATE_LIMITED: RateLimited,
    bt.ErrorCode.NOT_AUTHORIZED: NotPermitted,
    bt.ErrorCode.INSUFFICIENT_BALANCE: NotPermitted,
    bt.ErrorCode.INVALID_ARGUMENT: Rejected,
}


def translate(error: Exception, *, sent: bool) -> ChainError:
    """One of our errors for one of the SDK's: by the chain's own name, then by code, else unavailable.

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
        return ChainUnavailable(f"{name or 'no answer'}: {error.message}", name=name, fate_unknown=sent)
    if type(error) is bt.BittensorError:
        # Raised bare by the SDK's own checks of arguments, before anything is sent.
        return Rejected(str(error), name="InvalidArgument")
    detail = str(error) or "no answer in time"
    return ChainUnavailable(f"{type(error).__name__}: {detail}", name=type(error).__name__, fate_unknown=sent)


class SubtensorChain:
    """One hotkey's view of a subnet through ``substrate`` (``bt.RpcSubstrate``, or any other ``bt.Substrate``).

    Make one with ``open``. Bound to the event loop that opened it.
    """

    def __init__(
        self, substrate: bt.Substrate, wallet: bt.Wallet, *, netuid: int, hotkey: str, block_time: float
    ) -> None:
        self.netuid = netuid
        self.hotkey = hotkey
        self.block_time = block_time
        self._substrate = substrate
        self._client = bt.Client(substrate=substrate)
        self._wallet = wallet
        # The SDK caches nonces: one writer at a time per hotkey.
        self._writing = asyncio.Lock()
        self._final = -1

    @classmethod
    async def open(
        cls,
        network: str,
        *,
        netuid: int,
        wallet_path: str | Path,
        wallet_name: str,
        hotkey: str,
        archive: Sequence[str] = (),
    ) -> Self:
        """Connect to a network by name (``finney``, ``test``) or to a node by URL.

        Args:
            archive: URLs of nodes that keep old state; a network's name brings its own.

        Raises:
            ConfigError: there is no such hotkey.
            ChainUnavailable: no node answers.
        """
        wallet = bt.Wallet(wallet_name, hotkey, str(wallet_path))
        try:
            address = (await asyncio.to_thread(lambda: wallet.hotkey)).ss58_address
        except (OSError, ValueError, KeyfileError) as error:
            raise ConfigError(
                f"hotkey {hotkey!r} of wallet {wallet_name!r} in {wallet_path}: {error}: check --wallet.path, "
                "--wallet.name, --wallet.hotkey, and that the hotkey has no password"
            ) from error
        name, endpoint = resolve_endpoint(network)
        substrate = bt.RpcSubstrate(
            endpoint,
            fallback_endpoints=[url for url in default_fallback_endpoints(name) if url != endpoint],
            archive_endpoints=list(archive) or default_archive_endpoints(name),
        )
        try:
            async with asyncio.timeout(READ_SECONDS):
                await substrate.connect()
                block_time = await substrate.block_time()
        except SDK_ERRORS as error:
            await substrate.close()
            raise translate(error, sent=False) from error
        except BaseException:
            await substrate.close()
            raise
        # The SDK's own protocol lacks a return type that its own class has.
        return cls(substrate, wallet, netuid=netuid, hotkey=address, block_time=block_time)  # type: ignore[arg-type]

    async def head(self) -> int:
        return await self._read(self._client.block())

    async def blocks(self) -> AsyncGenerator[int, None]:
        last: int | None = None
        pause = self.block_time
        while True:
            try:
                async with aclosing(self._client.blocks()) as headers:  # type: ignore[type-var]
                    while True:
                        async with asyncio.timeout(STALL_BLOCKS * self.block_time):
                            number = (await anext(headers)).number
                        pause = self.block_time
                        # A fallback node may lag, or the subscription begin after a gap.
                        for missing in range(number if last is None else last + 1, number + 1):
                            last = missing
                            yield missing
            except StopAsyncIteration:
                logger.warning("the node ended the stream of blocks; subscribing anew in %.1f s", pause)
            except SDK_ERRORS as error:
                logger.warning("no blocks, subscribing anew in %.1f s: %s", pause, translate(error, sent=False))
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

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
        return await self._write(
            self._client.submit_call(call, self._wallet, signer="hotkey", wait_for_finalization=False)
        )

    async def set_weights(self, weights: Mapping[int, float]) -> int:
        rules.quantize_weights(weights)  # refuses what the SDK would refuse, by name
        intent = bt.SetWeights(netuid=self.netuid, weights=dict(weights))
        return await self._write(self._client.execute(intent, self._wallet, wait_for_finalization=False, retries=2))

    async def close(self) -> None:
        await self._client.close()

    async def _read(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await call
        except SDK_ERRORS as error:
            raise translate(error, sent=False) from error

    async def _write(self, call: Awaitable[bt.ExtrinsicResult]) -> int:
        """Block of inclusion. Cancelling does not withdraw the call."""
        async with self._writing:
            try:
                async with asyncio.timeout(WRITE_SECONDS + WRITE_BLOCKS * self.block_time):
                    result = (await call).raise_for_failure()
            except SDK_ERRORS as error:
                raise translate(error, sent=True) from error
        if result.extrinsic_id is None:
            raise ChainUnavailable("sent, but the node did not say in which block it landed", fate_unknown=True)
        return int(result.extrinsic_id.split("-")[0])

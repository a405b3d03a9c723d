"""Connects to a run for reading: chain, buckets and dataset. The reader needs no bucket and writes nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tplr.chain.connect import open_chain
from tplr.comms import Comms
from tplr.config import Environment
from tplr.errors import ChainUnavailable, ConfigError
from tplr.exchange.checkpoints import Checkpoint
from tplr.hparams import HParams, load_hparams
from tplr.node.arguments import Arguments
from tplr.node.data_loader import WindowDataLoader
from tplr.node.sources import PageDataSource, StoreDataSource, open_data_source
from tplr.resources import LocalMachine, Resources
from tplr.schemas import Bucket
from tplr.storage import S3Connections

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# ``Comms`` needs a bucket of its own; a reader never opens this one.
UNUSED_BUCKET = Bucket(name="nobody", account_id="0" * 32, access_key_id="0" * 32, secret_access_key="0" * 64)

FIRST_BLOCK_SECONDS = 60.0  # a few blocks of any chain

# Opens the services that must run during a command, and yields the environment of the command.
Surroundings = Callable[[], AbstractAsyncContextManager[Environment]]


@dataclass(frozen=True)
class NetworkReader:
    """A run on its network, open for reading."""

    arguments: Arguments
    environment: Environment
    connections: S3Connections
    hparams: HParams
    comms: Comms

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """Load the run's tokenizer. Blocks. Raises as ``HParams.load_tokenizer``."""
        return self.hparams.load_tokenizer(self.arguments.hparams.parent)

    async def data_source(self) -> PageDataSource | StoreDataSource:
        """Open the run's data. Raises as ``open_data_source``."""
        return await open_data_source(
            self.hparams,
            await asyncio.to_thread(self.tokenizer),
            self.connections,
            self.environment.dataset(),
            self.environment.cache_folder,
            resources=Resources.choose(LocalMachine.here(), self.environment.variables),
        )

    @asynccontextmanager
    async def data_loader(self) -> AsyncIterator[WindowDataLoader]:
        """Open a loader for batches of the run's data, by uid and window. Raises as ``open_data_source``."""
        async with WindowDataLoader(await self.data_source(), self.comms) as loader:
            yield loader

    async def start_window(self) -> int:
        """Return the run's first window. Raises ConfigError if none is published."""
        start = await self.comms.get_start_window()
        if start is None:
            raise ConfigError("no start window is published: the run has not started")
        return start

    def validator(self, uid: int | None = None) -> int:
        """Return ``uid``, or the leading validator's. Raises ConfigError if no validator has a bucket."""
        validator = self.comms.highest_stake_validator() if uid is None else uid
        if validator is None:
            raise ConfigError("no validator has a bucket on chain: give --validator")
        return validator

    async def newest_checkpoint(self, *, until: int | None = None) -> Checkpoint:
        """Find the leading validator's newest checkpoint up to window ``until``.

        Raises:
            ConfigError: there is none.
            ChainUnavailable, StoreError: as ``Comms.leaders_checkpoints``.
        """
        for one in await self.comms.leaders_checkpoints():
            if until is None or one.window <= until:
                return one
        before = "" if until is None else f" of window {until} or before"
        raise ConfigError(
            f"the leading validator has published no checkpoint of version {self.hparams.version}{before}"
        )


@asynccontextmanager
async def this_environment() -> AsyncIterator[Environment]:
    """Yield the environment of this process."""
    yield Environment.read()


@asynccontextmanager
async def open_network(
    args: Arguments, environment: Environment, *, publishes: bool = False
) -> AsyncIterator[NetworkReader]:
    """Connect to the network that ``args`` name, in ``environment``.

    Args:
        publishes: also write into the environment's gradients bucket, signed by the hotkey. Reading needs neither.

    Raises:
        ConfigError, ChainError, StoreError: the network or a bucket can't be reached.
    """
    hparams = load_hparams(args.hparams)
    async with AsyncExitStack() as stack:
        connections = await stack.enter_async_context(S3Connections.of(environment))
        chain = await stack.enter_async_context(
            open_chain(
                args.network,
                netuid=args.netuid,
                wallet_path=args.wallet_path,
                wallet_name=args.wallet_name,
                hotkey=args.wallet_hotkey if publishes else None,
                # Reading past windows needs archived blocks.
                archive=args.archive or ("local",) if args.network.startswith("local:") else args.archive,
            )
        )
        comms = Comms(
            chain,
            hparams,
            connections,
            own_bucket=environment.bucket("gradients", "write") if publishes else UNUSED_BUCKET,
            aggregator_bucket=environment.optional_bucket("aggregator"),
            checkpoints_bucket=environment.optional_bucket("checkpoints"),
            folder=environment.states_folder(chain.netuid),
        )
        await comms.refresh()
        clock = asyncio.create_task(comms.clock.run())
        stack.callback(clock.cancel)
        try:
            async with asyncio.timeout(FIRST_BLOCK_SECONDS):
                await comms.clock.wait_for_block(0)
        except TimeoutError as error:
            text = f"no block in {FIRST_BLOCK_SECONDS:.0f} s: check --subtensor.network"
            raise ChainUnavailable(text) from error  # the URL of a node may contain an access key
        yield NetworkReader(args, environment, connections, hparams, comms)

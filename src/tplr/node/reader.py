"""Connects to a network for reading: no bucket of its own, and old blocks are readable."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tplr.chain.connect import open_chain
from tplr.comms import Comms
from tplr.config import Environment
from tplr.hparams import HParams, load_hparams
from tplr.node.arguments import Arguments
from tplr.schemas import Bucket
from tplr.storage import S3Connections

# ``Comms`` needs a bucket of its own; a reader never opens this one.
UNUSED_BUCKET = Bucket(name="nobody", account_id="0" * 32, access_key_id="0" * 32, secret_access_key="0" * 64)

# Opens what has to run beside a command, and gives the environment to read in.
Surroundings = Callable[[], AbstractAsyncContextManager[Environment]]


@asynccontextmanager
async def here() -> AsyncIterator[Environment]:
    """This process's own environment, with nothing beside."""
    yield Environment.read()


@asynccontextmanager
async def connected(
    args: Arguments, environment: Environment, connections: S3Connections
) -> AsyncIterator[tuple[HParams, Comms]]:
    """The run's constants and a ``Comms`` that reads, refreshed once.

    Raises:
        ConfigError: arguments or environment are wrong.
        ChainError: the chain can't be reached.
    """
    hparams = load_hparams(args.hparams)
    async with open_chain(
        args.network,
        netuid=args.netuid,
        wallet_path=args.wallet_path,
        wallet_name=args.wallet_name,
        hotkey=args.wallet_hotkey,
        # Past windows need archived blocks.
        archive=args.archive or ("local",) if args.network.startswith("local:") else args.archive,
    ) as chain:
        comms = Comms(
            chain,
            hparams,
            connections,
            own_bucket=UNUSED_BUCKET,
            aggregator_bucket=environment.optional_bucket("aggregator"),
            checkpoints_bucket=environment.optional_bucket("checkpoints"),
            folder=environment.states_folder(chain.netuid),
        )
        await comms.refresh()
        yield hparams, comms

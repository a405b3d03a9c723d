"""``Comms``: a neuron's access to the chain's directory and to all buckets."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, Self

from tplr.chain.connect import open_chain
from tplr.comms.checkpoints import CheckpointExchange
from tplr.comms.included_updates import IncludedUpdates
from tplr.comms.peers import PeerLists
from tplr.comms.reports import ReportExchange
from tplr.comms.states import StateExchange
from tplr.comms.updates import UpdateExchange
from tplr.config import Environment, check_all
from tplr.hparams import HParams
from tplr.logging import logger
from tplr.resources import LocalMachine, Resources
from tplr.storage import S3Connections


class Wallet(Protocol):
    """The attributes of an SDK wallet that locate its hotkey."""

    @property
    def path(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def hotkey_str(self) -> str: ...


class Comms(UpdateExchange, IncludedUpdates, CheckpointExchange, StateExchange, PeerLists, ReportExchange):
    """Everything that a node, or another program, exchanges over chain and buckets.

    Each base class exchanges one kind of object, over the same ``NodeBuckets``. They are base classes, not components,
    because documented programs call the methods of this one object: a component would need forwarding methods here. No
    base class uses a sibling: it uses only its own attributes and its base's.
    """

    @classmethod
    @asynccontextmanager
    async def from_env(
        cls,
        hparams: HParams,
        *,
        wallet: Wallet,
        netuid: int = 3,
        network: str = "finney",
        archive: Sequence[str] = (),
    ) -> AsyncIterator[Self]:
        """Open ``Comms`` with the buckets of this process's environment, for an ``async with`` block.

            async with Comms.from_env(hparams, wallet=bt.Wallet("NAME", "HOTKEY")) as comms: ...

        The chain's directory is read once, as with ``refresh``. A long-running program also runs ``clock.run()`` and
        ``run_refresh()`` in a task group, as nodes do.

        Args:
            wallet: a wallet of the chain's SDK. Only its names and path are read.
            network, archive: as in ``chain.connect.open_chain``.

        Raises:
            ConfigError: lists all problems of the environment; or there is no such hotkey.
            ChainError: the chain can't be reached.
        """
        environment = Environment.read()
        machine = LocalMachine.here()
        check_all(
            environment.node_buckets,
            lambda: S3Connections.of(environment),
            lambda: Resources.choose(machine, environment.variables),
            lambda: environment.states_folder(netuid),
        )
        buckets = environment.node_buckets()
        resources = Resources.choose(machine, environment.variables)
        logger.info("%s", resources.describe(machine))
        opening = open_chain(
            network,
            netuid=netuid,
            wallet_path=wallet.path,
            wallet_name=wallet.name,
            hotkey=wallet.hotkey_str,
            archive=archive,
        )
        async with S3Connections.of(environment) as connections, opening as chain:
            comms = cls(
                chain,
                hparams,
                connections,
                own_bucket=buckets.gradients,
                aggregator_bucket=buckets.aggregator,
                checkpoints_bucket=buckets.checkpoints,
                folder=environment.states_folder(netuid),
                resources=resources,
            )
            await comms.refresh()
            yield comms

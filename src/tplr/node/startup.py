"""Build a node from its arguments, checking everything on the way, and leave it open on the caller's exit stack."""

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from tplr.chain import Chain
from tplr.chain.commitment import encode_commitment
from tplr.chain.connect import open_chain
from tplr.comms import Comms
from tplr.compress.layout import PayloadSpec
from tplr.config import bucket_for, buckets_for, dataset_subfolder, endpoint_override, optional_bucket
from tplr.errors import ConfigError, NotRegistered
from tplr.exchange.updates import SETTLE_SECONDS
from tplr.files import atomic_write
from tplr.hparams import HParams, load_hparams
from tplr.node.arguments import Arguments
from tplr.node.checks import Checks
from tplr.node.data_loader import WindowDataLoader
from tplr.node.replica import NodeContext, Replica
from tplr.node.sources import open_source
from tplr.schemas import Bucket
from tplr.storage import S3Connections
from tplr.storage.probe import ProbeResult, probe_access
from tplr.telemetry import JsonlListener, Listener, Telemetry, WandbListener, log_event
from tplr.training.model import build_model
from tplr.training.schemes import payload_spec

R = TypeVar("R")

# Nothing is decided by this machine's clock, but S3 refuses requests that are signed 15 minutes off.
MAX_SKEW_SECONDS = 300.0
FINAL_AFTER_BLOCKS = 10


@dataclass(frozen=True, kw_only=True)
class NodeComponents:
    """All that a role needs to run.

    Attributes:
        bucket: this node's own, as others may read it: what has to stand on chain.
    """

    hparams: HParams
    bucket: Bucket
    context: NodeContext
    data_loader: WindowDataLoader
    replica: Replica

    def role(self, make: Callable[[Replica, WindowDataLoader, NodeContext, HParams], R]) -> R:
        """The role that ``make`` makes of it."""
        return make(self.replica, self.data_loader, self.context, self.hparams)


@dataclass(frozen=True, kw_only=True)
class AggregatorKit:
    """All that an aggregator needs to run: it has no bucket on chain, no data and no model."""

    hparams: HParams
    context: NodeContext
    spec: PayloadSpec
    folder: Path
    bucket: None = None

    def role(self, make: Callable[[NodeContext, HParams, PayloadSpec, Path], R]) -> R:
        """The role that ``make`` makes of it."""
        return make(self.context, self.hparams, self.spec, self.folder)


async def prepare_aggregator(args: Arguments, stack: AsyncExitStack, checks: Checks) -> AggregatorKit | None:
    """As ``prepare``, for an aggregator. Writes nothing but a test object into its bucket."""
    hparams = checks.take("hparams", lambda: load_hparams(args.hparams))
    endpoint = checks.take("environment", lambda: (endpoint_override(),))
    bucket = checks.take("environment", lambda: bucket_for("aggregator", "write"))
    chain = await checks.wait("wallet and chain", stack.enter_async_context(_open_chain(args)))
    if chain:
        await checks.wait("registration", check_registration(chain, args))
        await checks.wait("clock", check_clock(chain))
    if endpoint and bucket:
        connections = await stack.enter_async_context(S3Connections(endpoint[0]))
        await checks.wait("bucket", check_writable(connections, bucket))
    listeners = checks.take("telemetry", lambda: open_listeners(args, stack))
    checks.take("state", lambda: check_state_folder(args.state_folder))
    spec = hparams and checks.take("model", lambda: payload_spec(hparams))
    if checks.problems or not (spec and listeners and hparams and bucket and chain and endpoint):
        return None
    comms = await stack.enter_async_context(
        Comms(chain, hparams, own_bucket=bucket, aggregator_bucket=bucket, endpoint=endpoint[0])
    )
    await checks.wait("chain", comms.refresh())
    if checks.problems:
        return None
    telemetry = Telemetry(role=args.role, uid=comms.uid, listeners=listeners)
    context = NodeContext(comms=comms, clock=comms.clock, telemetry=telemetry)
    return AggregatorKit(hparams=hparams, context=context, spec=spec, folder=args.state_folder)


async def prepare(args: Arguments, stack: AsyncExitStack, checks: Checks) -> NodeComponents | None:
    """Check and open everything; None if ``checks`` found problems. What was opened is closed by ``stack``.

    Writes nothing but a test object into the node's own bucket. Blocks the loop: nothing else runs yet.
    """
    hparams = checks.take("hparams", lambda: load_hparams(args.hparams))
    tokenizer = hparams and checks.take("tokenizer", lambda: hparams.load_tokenizer(args.hparams.parent))
    device = checks.take("device", lambda: check_device(args.device))
    place = checks.take("environment", lambda: (endpoint_override(), dataset_subfolder()))
    own = checks.take("environment", lambda: (bucket_for("gradients", "read"), bucket_for("gradients", "write")))
    replicas = checks.take("environment", lambda: buckets_for("dataset", "read"))
    aggregator = checks.take("environment", lambda: optional_bucket("aggregator"))
    common = checks.take("environment", lambda: optional_bucket("checkpoints"))
    chain = await checks.wait("wallet and chain", stack.enter_async_context(_open_chain(args)))
    if chain:
        await checks.wait("registration", check_registration(chain, args))
        await checks.wait("clock", check_clock(chain))
    if chain and hparams:
        checks.take("hparams", lambda: check_window(hparams, chain.block_time))
    connections = place and await stack.enter_async_context(S3Connections(place[0]))
    if own:
        checks.take("bucket", lambda: check_committable(own[0]))
    if connections and own:
        await checks.wait("bucket", check_bucket(connections, *own))
    source = None
    if hparams and place and connections and replicas and tokenizer:
        source = await checks.wait("dataset", open_source(hparams, tokenizer, connections, replicas, place))
    listeners = checks.take("telemetry", lambda: open_listeners(args, stack))
    checks.take("state", lambda: check_state_folder(args.state_folder))
    model = hparams and device and checks.take("model", lambda: build_model(hparams, device))
    if checks.problems or not (model and listeners and hparams and place and own and chain and source):
        return None

    comms = await stack.enter_async_context(
        Comms(
            chain,
            hparams,
            own_bucket=own[1],
            aggregator_bucket=aggregator,
            checkpoints_bucket=common,
            endpoint=place[0],
        )
    )
    await checks.wait("chain", comms.refresh())
    if checks.problems:
        return None
    telemetry = Telemetry(role=args.role, uid=comms.uid, listeners=listeners)
    context = NodeContext(comms=comms, clock=comms.clock, telemetry=telemetry)
    return NodeComponents(
        hparams=hparams,
        bucket=own[0],
        context=context,
        data_loader=await stack.enter_async_context(WindowDataLoader(source, comms)),
        replica=await stack.enter_async_context(
            Replica(model, hparams, context, args.state_folder, every_peer=args.test)
        ),
    )


def _open_chain(args: Arguments) -> AbstractAsyncContextManager[Chain]:
    return open_chain(
        args.network,
        netuid=args.netuid,
        wallet_path=args.wallet_path,
        wallet_name=args.wallet_name,
        hotkey=args.wallet_hotkey,
        archive=args.archive,
    )


def open_listeners(args: Arguments, stack: AsyncExitStack) -> tuple[Listener, ...]:
    """Who hears of this node's events: the log, and what was asked for. Raises ConfigError."""
    listeners: list[Listener] = [log_event]
    if args.events:
        listeners.append(stack.enter_context(JsonlListener(args.events)))
    if args.wandb_project:
        name = f"{args.role} {args.wallet_name}/{args.wallet_hotkey}"
        listeners.append(stack.enter_context(WandbListener(args.wandb_project, name=name)))
    return tuple(listeners)


def check_device(name: str) -> torch.device:
    """The torch device of that name. Raises ConfigError if it is none, or not in this machine."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {name}: {str(error).splitlines()[0]}; give a device of this machine, for instance --device cpu"
        ) from error
    return device


def check_state_folder(folder: Path) -> None:
    """Raises StateError if nothing can be saved there."""
    atomic_write(folder / "writable", b"")


def check_committable(bucket: Bucket) -> None:
    """Raises ConfigError if the chain's 128 characters can't name this bucket."""
    try:
        encode_commitment(bucket)
    except ValueError as error:
        raise ConfigError(f"R2_GRADIENTS_*: {error}") from error


async def check_registration(chain: Chain, args: Arguments) -> None:
    """Raises NotRegistered if the hotkey has no uid on the subnet."""
    metagraph = await chain.metagraph()
    if metagraph.uid_of(chain.hotkey) is None:
        raise NotRegistered(
            f"hotkey {args.wallet_hotkey} ({chain.hotkey}) has no uid on subnet {args.netuid}: register it, "
            f"or give another --wallet.name, --wallet.hotkey or --netuid"
        )


async def check_clock(chain: Chain) -> None:
    """Raises ConfigError if this machine's clock is far from the chain's."""
    # The head itself may still be replaced, and block 0 carries no time.
    block = await chain.block(max(1, await chain.head() - FINAL_AFTER_BLOCKS))
    skew = time.time() - block.time
    # Skipped slots make it older than its number says.
    if not -MAX_SKEW_SECONDS < skew < MAX_SKEW_SECONDS + 2 * FINAL_AFTER_BLOCKS * chain.block_time:
        raise ConfigError(
            f"this machine's clock is {skew:+.0f} s off block {block.number}'s time: set it (ntp), or, if the chain "
            "stands still, wait or use another --subtensor.network"
        )


def check_window(hparams: HParams, block_time: float) -> None:
    """Raises ConfigError if a window is too short to train in once an update is missing.

    Without the check one miss would lead to the next: who waits for an update that does not come finishes too late
    itself.
    """
    length = hparams.blocks_per_window * block_time
    waiting = hparams.time_window_delta_seconds + SETTLE_SECONDS + hparams.commit_margin_seconds
    waiting += hparams.manifest_timeout_seconds
    if length <= waiting:
        raise ConfigError(
            f"a window of {hparams.blocks_per_window} blocks of {block_time:g} s leaves no time to train: "
            f"time_window_delta_seconds {hparams.time_window_delta_seconds:g}, {SETTLE_SECONDS:g} s for the store's "
            f"clock, manifest_timeout_seconds {hparams.manifest_timeout_seconds:g} and commit_margin_seconds "
            f"{hparams.commit_margin_seconds:g} take {waiting:g} s of its {length:g} s"
        )


async def check_writable(connections: S3Connections, bucket: Bucket) -> None:
    """Raises ConfigError, with the variables to look at, if the aggregator's bucket can't be written."""
    store = connections.store(bucket)
    findings = await probe_access(store, store, variables="R2_AGGREGATOR", published=False)
    problems = [f"{found.found}; {found.remedy}" for found in findings if found.verdict is ProbeResult.PROBLEM]
    if problems:
        raise ConfigError(problems)


async def check_bucket(connections: S3Connections, readable: Bucket, writable: Bucket) -> None:
    """Try both credentials of the gradients bucket: the write key can write, the read key can read and nothing else.

    Raises:
        ConfigError: what doesn't work, with the variables to look at.
    """
    findings = await probe_access(
        connections.store(readable), connections.store(writable), variables="R2_GRADIENTS", published=True
    )
    problems = [f"{found.found}; {found.remedy}" for found in findings if found.verdict is ProbeResult.PROBLEM]
    if problems:
        raise ConfigError(problems)

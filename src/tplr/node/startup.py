"""Checks a node's arguments and opens its components on the caller's exit stack."""

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
from tplr.config import Environment
from tplr.errors import ConfigError, NotRegistered
from tplr.exchange.updates import SETTLE_SECONDS
from tplr.files import atomic_write
from tplr.hparams import HParams, load_hparams
from tplr.node.arguments import Arguments
from tplr.node.checks import Checks
from tplr.node.data_loader import WindowDataLoader
from tplr.node.replica import NodeContext, Replica
from tplr.node.sources import open_data_source
from tplr.schemas import Bucket
from tplr.storage import S3Connections
from tplr.storage.probe import ProbeResult, probe_access
from tplr.telemetry import JsonlListener, Listener, Telemetry, WandbListener, log_event
from tplr.training.model import build_model
from tplr.training.schemes import payload_spec

R = TypeVar("R")

# No decision depends on this machine's clock, but S3 refuses requests with a time that is 15 minutes off.
MAX_SKEW_SECONDS = 300.0
FINAL_AFTER_BLOCKS = 10


@dataclass(frozen=True)
class OwnBucket:
    """The gradients bucket of this node, with the key that only reads and the key that writes."""

    readable: Bucket
    writable: Bucket

    @classmethod
    def of(cls, env: Environment) -> "OwnBucket":
        return cls(env.bucket("gradients", "read"), env.bucket("gradients", "write"))


@dataclass(frozen=True, kw_only=True)
class NodeComponents:
    """All that a role needs to run.

    Attributes:
        bucket: this node's gradients bucket with its read key, to be committed on chain.
    """

    hparams: HParams
    bucket: Bucket
    context: NodeContext
    data_loader: WindowDataLoader
    replica: Replica

    def role(self, make: Callable[[Replica, WindowDataLoader, NodeContext, HParams], R]) -> R:
        """The role made from these components."""
        return make(self.replica, self.data_loader, self.context, self.hparams)


@dataclass(frozen=True, kw_only=True)
class AggregatorComponents:
    """All that an aggregator needs to run: no bucket on chain, no data, no model."""

    hparams: HParams
    context: NodeContext
    spec: PayloadSpec
    folder: Path
    bucket: None = None

    def role(self, make: Callable[[NodeContext, HParams, PayloadSpec, Path], R]) -> R:
        """The role made from these components."""
        return make(self.context, self.hparams, self.spec, self.folder)


async def prepare_aggregator(args: Arguments, stack: AsyncExitStack, checks: Checks) -> AggregatorComponents | None:
    """``prepare`` for an aggregator. Writes only a test object into its bucket."""
    hparams = checks.take("hparams", lambda: load_hparams(args.hparams))
    env = checks.take("environment", Environment.read) or Environment({})
    connections = checks.take("environment", lambda: S3Connections(env.endpoint))
    bucket = checks.take("environment", lambda: env.bucket("aggregator", "write"))
    chain = await checks.wait("wallet and chain", stack.enter_async_context(_open_chain(args)))
    if chain:
        await checks.wait("registration", check_registration(chain, args))
        await checks.wait("clock", check_clock(chain))
    if connections and bucket:
        await stack.enter_async_context(connections)
        await checks.wait("bucket", check_writable(connections, bucket))
    listeners = checks.take("telemetry", lambda: open_listeners(args, stack))
    checks.take("state", lambda: check_state_folder(args.state_folder))
    spec = hparams and checks.take("model", lambda: payload_spec(hparams))
    if checks.problems or not (spec and listeners and hparams and bucket and chain and connections):
        return None
    comms = Comms(chain, hparams, connections, own_bucket=bucket, aggregator_bucket=bucket)
    await checks.wait("chain", comms.refresh())
    if checks.problems:
        return None
    telemetry = Telemetry(role=args.role, uid=comms.uid, listeners=listeners)
    context = NodeContext(comms=comms, clock=comms.clock, telemetry=telemetry)
    return AggregatorComponents(hparams=hparams, context=context, spec=spec, folder=args.state_folder)


async def prepare(args: Arguments, stack: AsyncExitStack, checks: Checks) -> NodeComponents | None:
    """Check and open everything on ``stack``. Returns None if ``checks`` found problems.

    Writes only a test object into the node's own bucket. Blocks the loop: nothing else runs yet.
    """
    hparams = checks.take("hparams", lambda: load_hparams(args.hparams))
    tokenizer = hparams and checks.take("tokenizer", lambda: hparams.load_tokenizer(args.hparams.parent))
    device = checks.take("device", lambda: check_device(args.device))
    env = checks.take("environment", Environment.read) or Environment({})
    connections = checks.take("environment", lambda: S3Connections(env.endpoint))
    own = checks.take("environment", lambda: OwnBucket.of(env))
    location = checks.take("environment", env.dataset)
    aggregator = checks.take("environment", lambda: env.optional_bucket("aggregator"))
    common = checks.take("environment", lambda: env.optional_bucket("checkpoints"))
    chain = await checks.wait("wallet and chain", stack.enter_async_context(_open_chain(args)))
    if chain:
        await checks.wait("registration", check_registration(chain, args))
        await checks.wait("clock", check_clock(chain))
    if chain and hparams:
        checks.take("hparams", lambda: check_window(hparams, chain.block_time))
    if connections:
        await stack.enter_async_context(connections)
    if own:
        checks.take("bucket", lambda: check_committable(own.readable))
    if connections and own:
        await checks.wait("bucket", check_bucket(connections, own))
    source = None
    if hparams and connections and location and tokenizer:
        opening = open_data_source(hparams, tokenizer, connections, location, env.cache_folder)
        source = await checks.wait("dataset", opening)
    listeners = checks.take("telemetry", lambda: open_listeners(args, stack))
    checks.take("state", lambda: check_state_folder(args.state_folder))
    model = hparams and device and checks.take("model", lambda: build_model(hparams, device))
    if checks.problems or not (model and listeners and hparams and connections and own and chain and source):
        return None

    comms = Comms(
        chain,
        hparams,
        connections,
        own_bucket=own.writable,
        aggregator_bucket=aggregator,
        checkpoints_bucket=common,
    )
    await checks.wait("chain", comms.refresh())
    if checks.problems:
        return None
    telemetry = Telemetry(role=args.role, uid=comms.uid, listeners=listeners)
    context = NodeContext(comms=comms, clock=comms.clock, telemetry=telemetry)
    return NodeComponents(
        hparams=hparams,
        bucket=own.readable,
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
    """The listeners of this node's events: the log, and those given by arguments. Raises ConfigError."""
    listeners: list[Listener] = [log_event]
    if args.events:
        listeners.append(stack.enter_context(JsonlListener(args.events)))
    if args.wandb_project:
        name = f"{args.role} {args.wallet_name}/{args.wallet_hotkey}"
        listeners.append(stack.enter_context(WandbListener(args.wandb_project, name=name)))
    return tuple(listeners)


def check_device(name: str) -> torch.device:
    """The torch device of that name. Raises ConfigError if this machine has no such device."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {name}: {str(error).splitlines()[0]}; give a device of this machine, for instance --device cpu"
        ) from error
    return device


def check_state_folder(folder: Path) -> None:
    """Raises StateError if ``folder`` can't be written."""
    atomic_write(folder / "writable", b"")


def check_committable(bucket: Bucket) -> None:
    """Raises ConfigError if the bucket does not fit into the chain's commitment of 128 characters."""
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
    # The head may still be replaced, and block 0 has no time.
    block = await chain.block(max(1, await chain.head() - FINAL_AFTER_BLOCKS))
    skew = time.time() - block.time
    # Skipped slots make the block older than its distance from the head implies.
    if not -MAX_SKEW_SECONDS < skew < MAX_SKEW_SECONDS + 2 * FINAL_AFTER_BLOCKS * chain.block_time:
        raise ConfigError(
            f"this machine's clock is {skew:+.0f} s off block {block.number}'s time: set it (ntp); if the chain has "
            "stalled, wait or use another --subtensor.network"
        )


def check_window(hparams: HParams, block_time: float) -> None:
    """Raises ConfigError if a window leaves no time to train after the wait for a missing update.

    Otherwise one missed update would lead to the next: a node that waits for it would finish late itself.
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
    """Raises ConfigError, naming the variables to check, if the aggregator's bucket can't be written."""
    store = connections.store(bucket)
    findings = await probe_access(store, store, variables="R2_AGGREGATOR", published=False)
    problems = [f"{found.found}; {found.remedy}" for found in findings if found.verdict is ProbeResult.PROBLEM]
    if problems:
        raise ConfigError(problems)


async def check_bucket(connections: S3Connections, own: OwnBucket) -> None:
    """Check both keys of the gradients bucket: the write key must write; the read key must read, and not write.

    Raises:
        ConfigError: names each problem and the variables to check.
    """
    findings = await probe_access(
        connections.store(own.readable), connections.store(own.writable), variables="R2_GRADIENTS", published=True
    )
    problems = [f"{found.found}; {found.remedy}" for found in findings if found.verdict is ProbeResult.PROBLEM]
    if problems:
        raise ConfigError(problems)

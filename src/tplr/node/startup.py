"""Opens a node's connections on the caller's exit stack, and creates its role if all checks pass."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from tplr.chain import Chain
from tplr.chain.connect import LOCAL_PREFIX, check_network, open_chain
from tplr.comms import Comms
from tplr.config import Environment
from tplr.errors import OtherChain
from tplr.hparams import HParams, load_hparams
from tplr.keys import RunVersion
from tplr.logging import logger, take_over
from tplr.node.aggregator import Aggregator
from tplr.node.arguments import Arguments
from tplr.node.checks import Checks, answers_due, check_device
from tplr.node.data_loader import WindowDataLoader
from tplr.node.known_chain import known_genesis, moved_to_other_chain
from tplr.node.miner import Miner
from tplr.node.replica import NodeContext, Replica
from tplr.node.sources import PageDataSource, StoreDataSource, open_data_source
from tplr.node.start_checks import (
    check_access,
    check_answers,
    check_clock,
    check_committable,
    check_compiler,
    check_fits,
    check_registration,
    check_state_folder,
    check_window,
    twice,
)
from tplr.node.validator import Validator
from tplr.node.window_time import ModelSpeed
from tplr.planner.host import known_accelerator
from tplr.planner.plan import Plan
from tplr.resources import LocalMachine, Resources
from tplr.schemas import Bucket
from tplr.storage import S3Connections
from tplr.telemetry import JsonlListener, Listener, PrometheusListener, Telemetry, WandbListener, log_event
from tplr.training.commands import Commands
from tplr.training.model import build_model
from tplr.training.parallel import SINGLE_PROCESS
from tplr.training.profile import WindowProfile
from tplr.training.schemes import payload_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")


class Role(Protocol):
    """A node's work, window by window."""

    async def run(self) -> None:
        """Run until cancelled."""
        ...


@dataclass(frozen=True, kw_only=True)
class Node:
    """A role that is ready to run.

    Attributes:
        version: of the run.
        folder: of the saved state.
        bucket: the node's gradients bucket with the read key, to be committed on chain; None for an aggregator.
    """

    role: Role
    context: NodeContext
    version: RunVersion
    connections: S3Connections
    folder: Path
    bucket: Bucket | None = None


@dataclass(frozen=True, kw_only=True)
class _Services:
    """The services that ``_reach_services`` has opened; ``bucket`` is that of ``Node``."""

    chain: Chain | None
    comms: Comms | None
    source: PageDataSource | StoreDataSource | None
    connections: S3Connections | None
    bucket: Bucket | None


async def prepare(
    args: Arguments,
    env: Environment,
    stack: AsyncExitStack,
    checks: Checks,
    commands: Commands | None = None,
) -> Node | None:
    """Check and open everything on ``stack``; return None if ``checks`` found problems.

    Writes only a test object into the node's own bucket. Building the model blocks the loop, in which nothing else runs
    yet.

    Args:
        commands: of the ranks that hold the model together; None in a single process.
    """
    resources = checks.take("environment", use_resources, args, env)
    if args.role == "aggregator":
        return await _prepare_aggregator(args, env, stack, checks, resources)
    hparams = checks.take("hparams", load_hparams, args.hparams)
    device = checks.take("device", check_device, args.device)
    services = await _reach_services(args, env, stack, checks, hparams=hparams, resources=resources)
    if services.chain and hparams:
        checks.take("hparams", check_window, hparams, services.chain.block_time)
    listeners = checks.take("telemetry", open_listeners, args, stack)
    checks.take("state", check_state_folder, args.state_folder)
    parallel = commands.parallel if commands else SINGLE_PROCESS
    fits = hparams and device and checks.take("memory", check_fits, hparams, args, device, parallel.size)
    if device:
        checks.take("compiler", check_compiler, device, args.device_settings)
    model = (
        hparams
        and device
        and fits  # the replica loads the weights: a saved state's, or the first ones
        and checks.take("model", build_model, hparams, device, parallel, args.device_settings, first_weights=False)
    )
    profile = args.profile and checks.take("profile", WindowProfile, args.profile)
    comms, source, connections = services.comms, services.source, services.connections
    if checks.problems or not (
        model and fits and device and listeners and hparams and connections and comms and source
    ):
        return None

    context = _make_context(args, comms, listeners)
    replica = Replica(
        model,
        hparams,
        context,
        args.state_folder,
        every_peer=args.test,
        settings=args.device_settings,
        commands=commands,
    )
    await stack.enter_async_context(replica)
    data_loader = await stack.enter_async_context(WindowDataLoader(source, comms))
    if args.role == "miner":
        role = Miner(replica, data_loader, context, hparams, speed=_speed(fits, device), profile=profile)
    else:
        role = Validator(replica, data_loader, context, hparams)
    return Node(
        role=role,
        context=context,
        version=hparams.version,
        connections=connections,
        folder=args.state_folder,
        bucket=services.bucket,
    )


async def _reach_services(
    args: Arguments,
    env: Environment,
    stack: AsyncExitStack,
    checks: Checks,
    *,
    hparams: HParams | None,
    resources: Resources | None,
) -> _Services:
    """Connect concurrently to all services that a miner or validator needs; a service that failed is None."""
    connections = checks.take("environment", S3Connections.of, env)
    readable = checks.take("environment", env.bucket, "gradients", "read")
    writable = checks.take("environment", env.bucket, "gradients", "write")
    location = checks.take("environment", env.dataset)
    states = checks.take("environment", env.states_folder, args.netuid)
    aggregator = checks.take("environment", env.optional_bucket, "aggregator")
    common = checks.take("environment", env.optional_bucket, "checkpoints")
    if connections:
        await stack.enter_async_context(connections)
    if readable:
        checks.take("bucket", check_committable, readable)
    import_libraries(args)
    until = answers_due()

    async def open_source() -> PageDataSource | StoreDataSource | None:
        tokenizer = await asyncio.shield(loading)  # loading is a check of its own
        if not (hparams and tokenizer and connections and location and resources and states):
            return None
        opening = open_data_source(hparams, tokenizer, connections, location, env.cache_folder, resources=resources)
        return await checks.wait("dataset", opening)

    async def reach(name: str, check: Awaitable[None]) -> None:
        await checks.wait(name, check, until=until)
        if checks.outside_down(name):
            opening.cancel()  # the dataset uses the same service, and would be retried for a minute

    comms = None
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(_load_tokenizer(hparams, args.hparams.parent, checks, until))
        opening = group.create_task(open_source())
        if connections and readable and writable:
            stores = map(connections.store, (readable, writable))
            group.create_task(reach("bucket", check_access(*stores, variables="R2_GRADIENTS")))
        if connections and location:
            group.create_task(reach("dataset", check_answers([*map(connections.store, location.replicas)])))
        chain = await _checked_chain(args, stack, checks, until)
        if chain:
            checks.take("wallet and chain", chain.sign, b"a start-up check")  # a file may hold only the public key
        if chain and checks.neuron and hparams and connections and writable and states:
            comms = Comms(
                chain,
                hparams,
                connections,
                own_bucket=writable,
                aggregator_bucket=aggregator,
                checkpoints_bucket=common,
                folder=states,
                resources=resources,
            )
            await checks.wait("chain", twice(comms.refresh), until=until)
    source = None if opening.cancelled() else opening.result()
    return _Services(chain=chain, comms=comms, source=source, connections=connections, bucket=readable)


def import_libraries(args: Arguments) -> None:
    """Import slow libraries, so that their seconds do not count as answer time of services. Blocks."""
    if args.role != "aggregator":
        import_module("transformers").AutoTokenizer  # noqa: B018 - the first access imports it
        take_over("transformers", "huggingface_hub")
    if not args.network.startswith(LOCAL_PREFIX):
        import_module("tplr.chain.subtensor")


async def _load_tokenizer(
    hparams: HParams | None, folder: Path, checks: Checks, until: float
) -> PreTrainedTokenizerFast | None:
    """Load the tokenizer from a local folder, or from the hub, which must answer by ``until``."""
    if hparams is None:
        return None
    load = partial(hparams.load_tokenizer, folder)
    if (folder / hparams.tokenizer_name).exists():
        return checks.take("tokenizer", load)
    return await checks.wait("tokenizer", in_daemon_thread(load), until=until)


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread that the process does not wait for at exit: a hub may take minutes to fail."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish_future(finish: Callable[[Any], None], value: object) -> None:
        if not done.done():
            finish(value)

    def run() -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001 - every error is passed to the caller
            outcome = (done.set_exception, error)
        else:
            outcome = (done.set_result, found)
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
            loop.call_soon_threadsafe(finish_future, *outcome)

    threading.Thread(target=run, daemon=True, name="start-up").start()
    return await done


async def _prepare_aggregator(
    args: Arguments, env: Environment, stack: AsyncExitStack, checks: Checks, resources: Resources | None
) -> Node | None:
    """``prepare`` for an aggregator, which has no bucket on chain, no data and no model."""
    hparams = checks.take("hparams", load_hparams, args.hparams)
    connections = checks.take("environment", S3Connections.of, env)
    bucket = checks.take("environment", env.bucket, "aggregator", "write")
    states = checks.take("environment", env.states_folder, args.netuid)
    if connections:
        await stack.enter_async_context(connections)
    import_libraries(args)
    until, comms = answers_due(), None
    async with asyncio.TaskGroup() as group:
        if connections and bucket:
            store = connections.store(bucket)
            access = check_access(store, store, variables="R2_AGGREGATOR", published=False)
            group.create_task(checks.wait("bucket", access, until=until))
        chain = await _checked_chain(args, stack, checks, until)
        if chain and checks.neuron and hparams and connections and bucket and states:
            comms = Comms(
                chain,
                hparams,
                connections,
                own_bucket=bucket,
                aggregator_bucket=bucket,
                folder=states,
                resources=resources,
            )
            await checks.wait("chain", twice(comms.refresh), until=until)
    listeners = checks.take("telemetry", open_listeners, args, stack)
    checks.take("state", check_state_folder, args.state_folder)
    spec = hparams and checks.take("model", payload_spec, hparams)
    if checks.problems or not (spec and listeners and hparams and connections and comms):
        return None
    context = _make_context(args, comms, listeners)
    role = Aggregator(context, hparams, spec, args.state_folder)
    return Node(role=role, context=context, version=hparams.version, connections=connections, folder=args.state_folder)


async def _checked_chain(args: Arguments, stack: AsyncExitStack, checks: Checks, until: float) -> Chain | None:
    """Open the chain, and check registration and clock; ``until``: as in ``Checks.wait``, for all requests together."""

    async def ask(name: str, question: Callable[[], Awaitable[T]]) -> T | None:
        return await checks.wait(name, twice(question), until=until)

    checks.take("wallet and chain", check_network, args.network, args.archive)  # also if the wallet can't be opened
    chain = await ask("wallet and chain", lambda: stack.enter_async_context(_open_chain(args)))
    if chain:
        checks.neuron = await ask("registration", partial(check_registration, chain, args))
        if not checks.outside_down("registration"):
            await ask("clock", partial(check_clock, chain))
    return chain


def _make_context(args: Arguments, comms: Comms, listeners: tuple[Listener, ...]) -> NodeContext:
    telemetry = Telemetry(role=args.role, uid=comms.uid, listeners=listeners)
    return NodeContext(comms=comms, clock=comms.clock, telemetry=telemetry)


@contextlib.asynccontextmanager
async def _open_chain(args: Arguments) -> AsyncIterator[Chain]:
    """Open the chain of ``args``, which must be that of the node's state. Raises as ``open_chain``."""
    opening = open_chain(
        args.network,
        netuid=args.netuid,
        wallet_path=args.wallet_path,
        wallet_name=args.wallet_name,
        hotkey=args.wallet_hotkey,
        archive=args.archive,
        genesis=known_genesis(args.state_folder),
    )
    async with AsyncExitStack() as stack:
        try:
            chain = await stack.enter_async_context(opening)
        except OtherChain as error:
            raise moved_to_other_chain(args.state_folder, error) from error
        yield chain


def use_resources(args: Arguments, env: Environment) -> Resources:
    """Choose and log this node's numbers of threads and transfers; set PyTorch's threads. Raises ConfigError."""
    machine = LocalMachine.here(args.device.partition(":")[0])
    resources = Resources.choose(machine, env.variables)
    torch.set_num_threads(resources.tensor_threads)
    logger.info("%s", resources.describe(machine))
    return resources


def open_listeners(args: Arguments, stack: ExitStack | AsyncExitStack) -> tuple[Listener, ...]:
    """Open the listeners of this node's events: the log, and those given by arguments. Raises ConfigError."""
    listeners: list[Listener] = [log_event]
    if args.events:
        listeners.append(stack.enter_context(JsonlListener(args.events, max_bytes=round(args.events_max_mb * 1e6))))
    if args.metrics_port is not None:
        metrics = stack.enter_context(PrometheusListener(args.metrics_port, address=args.metrics_address))
        logger.info("metrics at http://%s:%d/metrics", args.metrics_address, metrics.port)
        listeners.append(metrics)
    if args.wandb_project:
        name = f"{args.role} {args.wallet_name}/{args.wallet_hotkey}"
        listeners.append(stack.enter_context(WandbListener(args.wandb_project, name=name)))
    return tuple(listeners)


def _speed(plan: Plan, device: torch.device) -> ModelSpeed:
    accelerator = known_accelerator(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    peak = accelerator.peak * plan.host.ranks if accelerator else None
    return ModelSpeed(plan.load.flops_per_token, peak)

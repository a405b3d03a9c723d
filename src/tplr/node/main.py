"""Runs a role as a process: arguments, checks, signals, one task group, exit status."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

from tplr.errors import ConfigError, NotRegistered, TplrError
from tplr.hparams import HParams
from tplr.logging import logger, name_node, setup_logging
from tplr.node.arguments import Arguments
from tplr.node.checks import Checks
from tplr.node.ranks import process_group, serve_rank_0, shard_training, with_rank_device
from tplr.node.replica import NodeContext
from tplr.node.stale_uploads import abort_stale_uploads
from tplr.node.startup import NodeComponents, prepare
from tplr.schemas import Bucket
from tplr.training.sharded import ProcessGroupContext

OK, CRASHED, CAN_NOT_START = 0, 1, 2

T = TypeVar("T", bound=Exception)


class Role(Protocol):
    """What a node does, made from its components; runs until it is cancelled."""

    async def run(self) -> None: ...


class Components(Protocol):
    """All that a role needs to run.

    Attributes:
        bucket: to be committed on chain, if the role has one.
    """

    @property
    def hparams(self) -> HParams: ...

    @property
    def context(self) -> NodeContext: ...

    @property
    def bucket(self) -> Bucket | None: ...

    def role(self, make: Any) -> Role: ...


Prepare = Callable[[Arguments, AsyncExitStack, Checks], Awaitable[Components | None]]


def main(args: Arguments, make: Callable[..., Role], *, prepare: Prepare = prepare) -> int:
    """Run a node until SIGINT or SIGTERM.

    Args:
        make: the role's class; ``Components.role`` calls it.
        prepare: checks the arguments and opens the components.

    Returns:
        Exit status: 0 after a signal, 1 after a crash, 2 if it could not start.
    """
    args = with_rank_device(args)
    setup_logging(debug=args.debug, trace=args.trace)
    name_node(args.role)
    try:
        with process_group(args) as group:
            if group and group.rank != 0:
                serve_rank_0(args, group)
                return OK
            return asyncio.run(_main(make, args, group, prepare))
    except ConfigError as error:
        logger.critical("%s", error)
        return CAN_NOT_START


async def _main(make: Callable[..., Role], args: Arguments, group: ProcessGroupContext | None, prepare: Prepare) -> int:
    # Some checks block. Nothing needs an orderly end before the node runs, so a signal exits at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(OK))
    stopped = asyncio.Event()
    try:
        async with AsyncExitStack() as stack:
            checks = Checks()
            components = await prepare(args, stack, checks)
            if components and args.check:
                print(f"{args.role}: all start-up checks passed", file=sys.stderr)  # noqa: T201 - what --check is for
                return OK
            if components:
                _cancel_on_signal(asyncio.current_task(), stopped)
            if components and components.bucket:
                await checks.wait("commitment", components.context.comms.try_commit(components.bucket))
            if components is None or checks.problems:
                checks.show()
                return CAN_NOT_START
            if group and isinstance(components, NodeComponents):
                shard_training(components.replica.train_state, components.hparams, group)
            await _run(args.role, make, components)
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise
    except (TplrError, ExceptionGroup) as error:
        if expelled := _first(error, NotRegistered):
            logger.critical("%s", expelled)
            return CAN_NOT_START
        logger.critical("crashed: %s", error, exc_info=error)
        return CRASHED
    return OK


def _first(error: Exception, kind: type[T]) -> T | None:
    """The first error of ``kind`` in ``error``, which may be a nested exception group."""
    if isinstance(error, kind):
        return error
    inner = error.exceptions if isinstance(error, ExceptionGroup) else ()
    return next((found for one in inner if (found := _first(one, kind))), None)


async def _run(name: str, make: Callable[..., Role], components: Components) -> None:
    comms, telemetry = components.context.comms, components.context.telemetry
    name_node(f"{name} {comms.uid}")
    role = components.role(make)
    async with asyncio.TaskGroup() as group:
        group.create_task(components.context.clock.run())
        group.create_task(comms.run_refresh())
        if components.bucket:
            group.create_task(comms.run_cleanup())
        for store in comms.own_stores:
            group.create_task(abort_stale_uploads(store))
        window = await components.context.clock.wait_for_window(0)
        logger.info("uid %d, version %s, window %d", comms.uid, components.hparams.version, window)
        telemetry.emit("started", version=components.hparams.version, window=window)
        try:
            await role.run()
        finally:
            telemetry.emit("stopped")


def _cancel_on_signal(task: asyncio.Task | None, stopped: asyncio.Event) -> None:
    """Cancel ``task`` at SIGINT or SIGTERM, and set ``stopped``, which distinguishes this from other cancellations."""
    assert task is not None

    def stop() -> None:
        stopped.set()
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)

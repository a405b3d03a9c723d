"""Runs a role as a process: start-up checks, signals, one task group, exit status."""

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from typing import TypeVar

from tplr.config import Environment, hide_write_keys
from tplr.errors import ConfigError, NotRegistered, Outdated, TplrError
from tplr.keys import version_at
from tplr.logging import logger, name_node, setup_logging
from tplr.node import failpoints
from tplr.node.arguments import Arguments
from tplr.node.checks import MISCONFIGURED, OUTDATED, Checks
from tplr.node.known_chain import remember_chain
from tplr.node.pulse import beat
from tplr.node.ranks import joined_ranks, serve_rank_0, with_rank_device
from tplr.node.software import SoftwareWatch
from tplr.node.stale_uploads import abort_stale_uploads
from tplr.node.start_checks import sole_node
from tplr.node.startup import Node, prepare
from tplr.training.commands import Commands

OK, CRASHED = 0, 1

T = TypeVar("T", bound=Exception)


def main(args: Arguments) -> int:
    """Run a node until SIGINT or SIGTERM.

    Returns:
        Exit status: 0 after a signal, 1 after a crash, 2 if it is misconfigured, 3 if it could not start because an
        external service is down (the chain, a bucket, the model hub): a later try may succeed; 4 if the run continues
        under rules that it does not know.
    """
    setup_logging(debug=args.debug, trace=args.trace, json_lines=args.log_format == "json")
    name_node(args.role)
    try:
        environment = Environment.read()
        hide_write_keys()
        args = with_rank_device(args, environment)
        if environment.kill_at:
            failpoints.hook.set(failpoints.KillAt(environment.kill_at))
        checks = Checks()
        with joined_ranks(args, environment, checks) as commands:
            if commands and commands.parallel.rank != 0:
                serve_rank_0(args, commands)
                return OK
            return asyncio.run(_main(args, environment, checks, commands))
    except ConfigError as error:
        logger.critical("%s", error)
        return MISCONFIGURED


async def _main(args: Arguments, environment: Environment, checks: Checks, commands: Commands | None) -> int:
    # Some checks block. Before the node runs, nothing needs a clean shutdown, so a signal exits at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(OK))
    stopped = asyncio.Event()
    try:
        async with AsyncExitStack() as stack:
            if not args.check:  # checks may run beside the node
                checks.take("state", stack.enter_context, sole_node(args.state_folder))
            node = await prepare(args, environment, stack, checks, commands)
            if node and args.check:
                print(f"{args.role}: all start-up checks passed", file=sys.stderr)  # noqa: T201 - the output of --check
                return OK
            if node:
                _cancel_on_signal(asyncio.current_task(), stopped)
                checks.take("state", remember_chain, args.state_folder, node.context.comms.chain.genesis)
            if node and node.bucket:
                await checks.wait("commitment", node.context.comms.try_commit(node.bucket))
            if node is None or checks.problems:
                checks.show()
                return checks.status
            await _run(args.role, node)
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise
    except (TplrError, ExceptionGroup) as error:
        if expelled := _first(error, NotRegistered):
            logger.critical("%s", expelled)
            return MISCONFIGURED
        if outdated := _first(error, Outdated):
            logger.critical("%s", outdated)
            return OUTDATED
        logger.critical("crashed: %s", error, exc_info=error)
        return CRASHED
    return OK


def _first(error: Exception, kind: type[T]) -> T | None:
    """Return the first error of ``kind`` in ``error``, which may be a nested exception group."""
    if isinstance(error, kind):
        return error
    inner = error.exceptions if isinstance(error, ExceptionGroup) else ()
    return next((found for one in inner if (found := _first(one, kind))), None)


async def _run(name: str, node: Node) -> None:
    comms, clock, telemetry = node.context.comms, node.context.clock, node.context.telemetry
    name_node(f"{name} {comms.uid}")
    async with asyncio.TaskGroup() as group:
        group.create_task(clock.run())
        group.create_task(comms.run_refresh())
        if node.bucket:
            group.create_task(comms.run_cleanup())
        watch = SoftwareWatch(node.context, node.version, publishes=node.bucket is not None)
        group.create_task(watch.run())
        group.create_task(beat(node.context, node.connections, node.folder))
        for store in comms.own_stores:
            group.create_task(abort_stale_uploads(store))
        window = await clock.wait_for_window(0)
        version = version_at(node.version, window)
        logger.info("uid %d, version %s, window %d", comms.uid, version, window)
        telemetry.emit("started", version=version, window=window)
        try:
            await node.role.run()
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

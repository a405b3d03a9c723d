"""``tplr watch``: the live view of a network."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tplr.cli.network import add_network_arguments, run_on_network
from tplr.cli.reported import run_reported
from tplr.number_arguments import positive_count

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tplr.node.network_reader import NetworkReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--once", action="store_true", help="print one frame and exit")
    add("--validator", type=int, metavar="UID", help="whose scores are shown (default: the leading validator's)")
    add("--windows", type=positive_count, default=8, metavar="N", help="how many of the newest are read (default: 8)")
    add_network_arguments(parser)
    parser.epilog = (
        "With --events FILE it shows the node that writes this file, and reads neither buckets nor chain; "
        "with --local a localnet, while it runs or afterwards."
    )


def run(args: argparse.Namespace) -> int:
    import asyncio

    if args.events and (args.local or args.validator is not None):
        args.parser.error("--events shows one node from its file: leave out --local and --validator")
    if args.events:
        from tplr.console import Console
        from tplr.watch.command import watch
        from tplr.watch.own_events import EventsSource

        console = Console()
        return run_reported(lambda: asyncio.run(_done(watch(EventsSource(args.events), console, once=args.once))))

    async def work(network: NetworkReader, _: str) -> int:
        from tplr.console import Console
        from tplr.watch.command import watch
        from tplr.watch.published import PublishedSource

        await network.start_window()
        source = PublishedSource(network, validator=args.validator, windows=args.windows)
        return await _done(watch(source, Console(), once=args.once))

    return run_on_network(args, work)


async def _done(watching: Coroutine[None, None, None]) -> int:
    await watching
    return 0

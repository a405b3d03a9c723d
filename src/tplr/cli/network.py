"""Arguments of commands that read a run's network, and functions that run them on a network or a finished localnet."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tplr.cli.reported import run_reported
from tplr.node.arguments import Arguments, node_arguments
from tplr.node.arguments import add_arguments as add_node_arguments

if TYPE_CHECKING:
    from tplr.node.network_reader import NetworkReader, Surroundings

AUTO = "auto"  # cuda if there is one, else cpu
RESULTS = Path("evaluations")

# Does a command's work on a network, with the device's name; returns the exit status.
Work = Callable[["NetworkReader", str], Awaitable[int]]


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for reaching the network."""
    add_reader_arguments(parser)
    parser.set_defaults(device=AUTO)


def add_reader_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for reaching the network, for commands that compute on the CPU or on a given device."""
    group = parser.add_argument_group("arguments of a node, to reach the network")
    group.add_argument(
        "--run",
        dest="description",
        type=Path,
        metavar="FILE",
        help="the run's description, run.toml: says which chain, hparams and buckets, and nothing else is needed",
    )
    add_node_arguments(group)


def window_or(*names: str) -> Callable[[str], str]:
    """Return a type of an argument: a window's number, or one of these names (``node/replay.py``)."""

    def window(text: str) -> str:
        if text not in names and not text.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number, or {' or '.join(names)}")
        return text

    return window


def add_results_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the folder of evaluation results."""
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help=f"folder of evaluation results (default: {RESULTS}, with --local that of the run)",
    )


def results_folder(args: argparse.Namespace) -> Path:
    """Return the folder of ``--results``, or its default."""
    return args.results or (args.local / RESULTS if args.local else RESULTS)


def network_of(args: argparse.Namespace) -> tuple[Arguments, Surroundings | None]:
    """Return the network's arguments, and the environment for reading it if that is not this process's.

    Ends the process with status 2 if ``--local`` names no localnet whose buckets were kept, or ``--run`` no valid
    description.
    """
    network, parser = node_arguments(args), args.parser
    assert isinstance(parser, argparse.ArgumentParser)
    if args.local and args.description:
        parser.error("give --local or --run, not both")
    from tplr.errors import ConfigError

    try:
        if args.description:
            from tplr.join.reader import described, reader_arguments

            return reader_arguments(network, args.description), partial(described, args.description)
        if args.local:
            from tplr.localnet.kept import check_kept

            check_kept(args.local)  # before the imports of PyTorch, which take seconds
            from tplr.localnet import reopen

            return reopen.reader_arguments(network, args.local), partial(reopen.reopened, args.local)
    except ConfigError as error:
        parser.error(str(error))  # exits with status 2
    return network, None


def run_on_network(args: argparse.Namespace, work: Work, *, publishes: bool = False) -> int:
    """Connect for reading, and do the work.

    Args:
        publishes: whether the work also writes into this hotkey's own bucket; its write key must be in the environment.

    Returns:
        The work's exit status; 2 after an error, which is logged as one line.
    """
    import asyncio

    arguments, surroundings = network_of(args)
    from tplr.node.network_reader import open_network, this_environment

    async def connected() -> int:
        async with (
            (surroundings or this_environment)() as environment,
            open_network(arguments, environment, publishes=publishes) as network,
        ):
            return await work(network, device_name(arguments.device))

    return run_reported(lambda: asyncio.run(connected()), debug=arguments.debug)


def device_name(device: str) -> str:
    """Return the device of ``--device``. Raises ConfigError if this machine has no such device."""
    import torch

    from tplr.node.checks import check_device

    if device == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(check_device(device))

"""``tplr``: one command with a subcommand for each task; ``tplr --help`` lists them."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from tplr.cli.reported import output_unread
from tplr.migration import argument_hints

# Subcommand → the module of this package that implements it, and one line for --help. Such a module has
# ``add_arguments(parser)`` and ``run(args) -> exit status``, and imports PyTorch and the like only in ``run``.
COMMANDS = {
    "localnet": ("localnet", "run a whole network on this machine and train a real model"),
    "join": ("join", "take part in a run: check the requirements, write .env, run all checks, set up the service"),
    "run": ("run", "describe a run that you start, so that others can join it"),
    "doctor": ("doctor", "test buckets, keys and all that a node needs at start, and print remedies"),
    "plan": ("plan", "compute what a run needs: memory, disk, traffic, its price, and a window's timeline"),
    "data": ("data", "create, show, verify and measure datasets and token stores"),
    "explain": ("inspect", "show every factor of a miner's score in a window, and the weight that follows"),
    "audit": ("inspect", "recompute a window from the buckets: included set, model, scores"),
    "watch": ("watch", "show a network live: windows, nodes, elections, scores and problems"),
    "page": ("page", "write one HTML page of a run: losses, pay and its reasons, agreement, checkpoints"),
    "export": ("export", "write a window's model as a folder that other programs load, with a card of facts"),
    "generate": ("generate", "continue a prompt with an exported model, or with a run's"),
    "eval": ("evaluate", "evaluate an exported model or a run's checkpoints: bits per byte, and lm-eval's tasks"),
    "replay": ("replay", "replay a run's windows without a participant or with another rule, and compare losses"),
    "clean": ("clean", "list what former runs and uids left in a node's own bucket, and delete it"),
    "miner": ("node", "run a miner, as neurons/miner.py does"),
    "validator": ("node", "run a validator, as neurons/validator.py does"),
    "aggregator": ("node", "run an aggregator, as neurons/aggregator.py does"),
}

TAKE_NODE_ARGUMENTS = (
    "node",
    "inspect",
    "doctor",
    "watch",
    "page",
    "export",
    "generate",
    "evaluate",
    "replay",
    "clean",
)
INTERRUPTED, UNREAD = 130, 141  # as a shell shows the ends by SIGINT and SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process); return the exit status.

    It is 130 after Ctrl-C, and 141 if the reader of standard output has ended, such as ``head``.
    """
    try:
        args = parse_arguments(sys.argv[1:] if argv is None else argv)
        status = args.run(args)
        if output_unread():
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not output_unread():
            raise
        # The interpreter flushes the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of the subcommand at the start of ``argv``. The result also has its name as ``command``, its
    function as ``run``, the parser with its usage as ``parser``, and ``argv`` as ``command_line``.

    Imports only that subcommand. A wrong command line ends the process with status 2 and the subcommand's usage.
    """
    parser = argparse.ArgumentParser(prog="tplr", description="templar: train one language model over the internet")
    parser.add_argument("--version", action="version", version=f"tplr {version('tplr')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    name, *rest = argv or [""]
    if name not in COMMANDS:
        parser.parse_args(argv)  # prints help, the version or an error, and ends the process
    place, summary = COMMANDS[name]
    command = import_module(f"tplr.cli.{place}")
    command_parser = argparse.ArgumentParser(prog=f"tplr {name}", description=summary)
    command_parser.set_defaults(command=name, run=command.run, parser=command_parser, command_line=list(argv))
    command.add_arguments(command_parser)
    args, unknown = command_parser.parse_known_args(rest)
    if unknown:
        hints = argument_hints(unknown) if place in TAKE_NODE_ARGUMENTS else ""
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hints}")
    return args

"""``tplr explain`` and ``tplr audit``: read and recompute what a validator published."""

import argparse
from pathlib import Path

from tplr.cli.network import add_reader_arguments, network_of, window_or
from tplr.cli.reported import run_reported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    explains = parser.get_default("command") == "explain"
    add(
        "--window",
        type=window_or("latest"),
        required=not explains,
        default="latest",
        metavar="W|latest",
        help=f"its number, or the newest whose scores are published{' (default)' if explains else ''}",
    )
    add("--validator", type=int, help="uid of the validator (default: the leading one)")
    if explains:
        add("--uid", type=int, required=True, help="uid of the miner")
    else:
        add(
            "--from",
            dest="source",
            default="start",
            metavar="start|checkpoint|FOLDER",
            help="start from the run's first weights (default), from the leading validator's newest checkpoint that is "
            "not after the window, or from a node's saved state",
        )
        add("--all", action="store_true", help="check the scores of every replayed window, not only of the last")
        add("--record", type=Path, metavar="FILE", help="append the result to this file, for the page of the run")
    add_reader_arguments(parser)


def run(args: argparse.Namespace) -> int:
    network, surroundings = network_of(args)
    from tplr.node.inspect_cli import Request, main

    request = Request(
        window=args.window,
        uid=getattr(args, "uid", -1),
        validator=args.validator,
        source=getattr(args, "source", "start"),
        all=getattr(args, "all", False),
        record=getattr(args, "record", None),
        network=network,
    )
    return run_reported(lambda: main(args.command, request, surroundings), debug=network.debug)

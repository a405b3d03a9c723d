"""``tplr miner``, ``tplr validator`` and ``tplr aggregator``: run a node."""

import argparse

from tplr.node.arguments import add_arguments as add_node_arguments
from tplr.node.arguments import node_arguments
from tplr.number_arguments import positive_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=positive_count,
        default=1,
        metavar="N",
        help="run the node as N processes, one for each GPU (default: %(default)s)",
    )
    add_node_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.ranks > 1:
        from tplr.node.launch import launch

        return launch(args.ranks, [*args.command_line, "--ranks", "1"])  # the last value of an option counts
    from tplr.node.main import main

    return main(node_arguments(args))

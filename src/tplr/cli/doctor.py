"""``tplr doctor``: test buckets, keys, and everything that a node needs at its start."""

import argparse
from dataclasses import replace
from functools import partial

from tplr.config import KINDS
from tplr.node.arguments import add_arguments as add_node_arguments
from tplr.node.arguments import node_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="KIND",
        help=f"test these buckets alone: {', '.join(KINDS)} (default: the node's own, every other that is configured, "
        "and the node)",
    )
    parser.add_argument("--role", choices=("miner", "validator", "aggregator"), default="miner", help="of the node")
    add_node_arguments(parser.add_argument_group("the node"))


def run(args: argparse.Namespace) -> int:
    from tplr.doctor import main

    if args.kinds:
        return main(args.kinds)
    from tplr.node.health import examine_node

    own = "aggregator" if args.role == "aggregator" else "gradients"
    return main((), partial(examine_node, replace(node_arguments(args), role=args.role)), own=own)

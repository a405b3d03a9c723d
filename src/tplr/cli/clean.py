"""``tplr clean``: list what former runs, uids, uploads and tests left in a node's own bucket, and delete it."""

import argparse
from typing import TYPE_CHECKING

from tplr.cli.network import add_network_arguments, run_on_network

if TYPE_CHECKING:
    from tplr.node.network_reader import NetworkReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bucket",
        choices=("gradients", "checkpoints", "aggregator", "page"),
        default="gradients",
        help="of this environment, with its write key (default: %(default)s)",
    )
    parser.add_argument(
        "--delete",
        nargs="+",
        default=[],
        metavar="GROUP",
        help="delete these groups, as the list names them, for ever (default: only list all groups)",
    )
    add_network_arguments(parser)


def run(args: argparse.Namespace) -> int:
    async def work(network: "NetworkReader", _: str) -> int:
        from tplr.node.leftovers import clean

        return await clean(network, args.bucket, args.delete)

    return run_on_network(args, work)

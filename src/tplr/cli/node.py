"""``tplr miner``, ``tplr validator`` and ``tplr aggregator``: run a node."""

import argparse

from tplr.node.arguments import add_arguments, node_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from tplr.node.main import main

    return main(node_arguments(args))

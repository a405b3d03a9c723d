"""``tplr miner``, ``tplr validator`` and ``tplr aggregator``: run a node."""

import argparse

from tplr.node.arguments import add_arguments, node_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from tplr.node.main import main

    arguments = node_arguments(args)
    if arguments.role == "aggregator":
        from tplr.node.aggregator import Aggregator
        from tplr.node.startup import prepare_aggregator

        return main(arguments, Aggregator, prepare=prepare_aggregator)
    if arguments.role == "miner":
        from tplr.node.miner import Miner as Role
    else:
        from tplr.node.validator import Validator as Role
    return main(arguments, Role)

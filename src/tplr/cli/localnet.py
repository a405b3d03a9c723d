"""``tplr localnet``: a whole network on this machine."""

import argparse

from tplr.localnet.plan import add_arguments

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from tplr.localnet.command import main

    return main(args)

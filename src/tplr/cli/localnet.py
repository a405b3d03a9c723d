"""``tplr localnet``: a whole network on this machine."""

import argparse

from tplr.localnet.plan import add_arguments

__all__ = ["add_arguments", "run"]

CAN_NOT_START = 2


def run(args: argparse.Namespace) -> int:
    from tplr.errors import ConfigError
    from tplr.localnet.plan import make_plan
    from tplr.localnet.problems import show_problems

    of_the_parser = ("command", "run", "parser", "command_line")
    try:
        plan = make_plan(**{name: value for name, value in vars(args).items() if name not in of_the_parser})
    except ConfigError as error:
        show_problems(error)
        return CAN_NOT_START
    from tplr.localnet.command import main  # imports PyTorch, which takes seconds

    return main(plan)

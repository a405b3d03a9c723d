"""``tplr``: one command with a subcommand for each thing to do; ``tplr --help`` lists them."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

NODES = ("miner", "validator", "aggregator")
# Their arguments are a node's, and some of their own.
READERS = {
    "explain": "every factor of a miner's score in a window, and how its weight follows",
    "audit": "recompute a window from the buckets: included set, model, scores",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own); returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in READERS:
        from tplr.node.inspect_cli import main as read

        return read(argv[0], argv[1:])
    if argv and argv[0] in NODES:
        return _run_node(argv[0], argv[1:])
    parser = argparse.ArgumentParser(prog="tplr", description="templar: training over the open internet")
    parser.add_argument("--version", action="version", version=f"tplr {version('tplr')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_localnet(commands)
    _add_doctor(commands)
    _add_data(commands)
    for reader, about in READERS.items():
        commands.add_parser(reader, help=about)
    for node in NODES:  # listed here for --help; their arguments are the nodes' own
        commands.add_parser(node, help=f"run {'an' if node[0] in 'aeiou' else 'a'} {node}, as neurons/{node}.py does")
    given = vars(parser.parse_args(argv))
    del given["command"]
    run = given.pop("run")
    return run(argparse.Namespace(**given))


def _add_localnet(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tplr.localnet.plan import add_arguments

    parser = commands.add_parser("localnet", help="a whole network on this machine, training a real model")
    add_arguments(parser)

    def run(args: argparse.Namespace) -> int:
        from tplr.localnet.command import main as run_localnet

        return run_localnet(args)

    parser.set_defaults(run=run)


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("doctor", help="try every configured bucket and key, and say what to change")
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="KIND",
        help="gradients, aggregator, dataset or checkpoints (default: gradients, and the others that have settings)",
    )

    def run(args: argparse.Namespace) -> int:
        from tplr.doctor import main as run_doctor

        return run_doctor(args.kinds)

    parser.set_defaults(run=run)


def _add_data(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from tplr.cli import data

    parser = commands.add_parser("data", help="make, show, verify and measure data sets and stores")
    data.add_arguments(parser)
    parser.set_defaults(run=data.run)


def _run_node(role: str, argv: Sequence[str]) -> int:
    from tplr.node.main import main as run_node

    if role == "aggregator":
        from tplr.node.aggregator import Aggregator
        from tplr.node.startup import prepare_aggregator

        return run_node(role, Aggregator, argv, prepare=prepare_aggregator)
    if role == "miner":
        from tplr.node.miner import Miner as Role
    else:
        from tplr.node.validator import Validator as Role
    return run_node(role, Role, argv)

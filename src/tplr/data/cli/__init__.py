"""``tplr data VERB``: the data library's commands. A verb is the module of its name in this folder."""

import argparse
from importlib import import_module

# A verb's module has ``add_arguments(parser)`` and ``run(args) -> exit status``, and imports what is heavy in ``run``.
VERBS: dict[str, str] = {}  # name → one line for --help


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` a subcommand for each verb."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, says in VERBS.items():
        verb = import_module(f"{__name__}.{name}")
        verb_parser = verbs.add_parser(name, help=says, description=says)
        verb.add_arguments(verb_parser)
        verb_parser.set_defaults(run_verb=verb.run)


def run(args: argparse.Namespace) -> int:
    """Run the verb that was parsed; returns its exit status."""
    return args.run_verb(args)

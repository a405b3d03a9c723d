"""``tplr data VERB``: the data library's commands. A verb is the module of its name in this folder."""

import argparse
import sys
from importlib import import_module

from tplr.errors import TplrError
from tplr.logging import setup_logging

# A verb's module has ``add_arguments(parser)`` and ``run(args) -> exit status``, and imports what is heavy in ``run``.
VERBS = {  # name → one line for --help
    "make": "a dataset of pages out of text, JSON lines or parquet",
    "prepare": "a store of token ids out of raw records",
    "upload": "put a dataset or a token store into the dataset bucket; go on where an earlier upload ended",
    "verify": "compare a dataset or a token store with its manifest",
    "page": "show pages: rows and tokens",
    "peek": "show records of a stream of files: samples, tokens, statistics",
    "bench": "measure a stream of files: first batch, resume, tokens per second, size of the state",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` a subcommand for each verb."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, says in VERBS.items():
        verb = import_module(f"{__name__}.{name}")
        verb_parser = verbs.add_parser(name, help=says, description=says)
        verb.add_arguments(verb_parser)
        verb_parser.set_defaults(run_verb=verb.run)


def run(args: argparse.Namespace) -> int:
    """Run the verb that was parsed; returns its exit status: 2 if it could not be done."""
    setup_logging()
    try:
        return args.run_verb(args)
    except TplrError as error:
        sys.stderr.write(f"tplr data {args.verb}: {error}\n")
        return 2

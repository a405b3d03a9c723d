"""``tplr data VERB``: the commands of the data library. Each verb is the module of its name in this folder."""

import argparse
import sys
from importlib import import_module

from tplr.cli.reported import run_reported

# Verb → one line for --help. The module of a verb is like that of a subcommand (``tplr.cli.COMMANDS``).
VERBS = {
    "make": "make a dataset of pages from text, JSON lines or parquet files",
    "prepare": "make a token store from raw records",
    "upload": "upload a dataset or a token store to the dataset bucket; resumes an interrupted upload",
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
        verb_parser.set_defaults(run_verb=verb.run, parser=verb_parser)


def run(args: argparse.Namespace) -> int:
    """Run the parsed verb; return its exit status, which is 2 after an error."""

    def report(text: str) -> None:
        sys.stderr.write(f"tplr data {args.verb}: {text}\n")

    return run_reported(lambda: args.run_verb(args), report=report)

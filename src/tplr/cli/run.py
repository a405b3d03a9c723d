"""``tplr run init``: describe a run that you start."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    says = "write run.toml from hparams and this environment's bucket variables"
    verb = verbs.add_parser("init", help=says, description=says)
    add = verb.add_argument
    add("--name", required=True, help="of the run: a-z, 0-9 and -")
    add("--netuid", type=int, required=True, help="subnet")
    add("--network", default="finney", help="of the chain: name, or URL of a node (default: %(default)s)")
    add("--hparams", type=Path, default=Path("hparams.json"), help="the run's constants (default: %(default)s)")
    add("--first-window", type=int, metavar="W", help="announced first window (default: when enough miners are there)")
    add("--link", action="append", default=[], metavar="NAME=URL", help="such as chat=https://...; may be repeated")
    add("--out", type=Path, help="default: run.toml beside the hparams file")
    add("--replace", action="store_true", help="replace an existing file")
    verb.set_defaults(parser=verb)


def run(args: argparse.Namespace) -> int:
    from tplr.errors import TplrError
    from tplr.join.init import describe, write

    path = args.out or args.hparams.with_name("run.toml")
    try:
        description = describe(
            name=args.name,
            netuid=args.netuid,
            network=args.network,
            hparams=args.hparams,
            first_window=args.first_window,
            links=dict(one.partition("=")[::2] for one in args.link),
            out=path,
            replace=args.replace,
        )
        write(description, path, replace=args.replace)
    except TplrError as error:
        sys.stderr.write(f"tplr run init: {error}\n")
        return 2
    sys.stdout.write(f"{path}: publish it together with {description.hparams.file}; whoever has both can join\n")
    return 0

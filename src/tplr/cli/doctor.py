"""``tplr doctor``: test buckets and keys."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="KIND",
        help="gradients, aggregator, dataset or checkpoints (default: gradients, and every other that is configured)",
    )


def run(args: argparse.Namespace) -> int:
    from tplr.doctor import main

    return main(args.kinds)

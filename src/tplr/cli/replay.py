"""``tplr replay``: measures the effect of one participant, or of one rule, on the model."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tplr.cli.network import add_network_arguments, run_on_network, window_or

if TYPE_CHECKING:
    from tplr.node.network_reader import NetworkReader
    from tplr.run.replay import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--from",
        dest="first",
        required=True,
        type=window_or("start", "latest"),
        metavar="W|start|latest",
        help="first window to apply again; start: the run's first",
    )
    add(
        "--to",
        dest="last",
        default="latest",
        type=window_or("latest"),
        metavar="W|latest",
        help="last window (default: the newest)",
    )
    add(
        "--without-uid",
        dest="without",
        action="append",
        type=int,
        default=[],
        metavar="U",
        help="leave out its updates",
    )
    add(
        "--with-scheme",
        dest="scheme",
        action="append",
        type=_constant,
        default=[],
        metavar="NAME=VALUE",
        help="another constant of the update scheme, such as learning_rate.peak=0.001",
    )
    add_network_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if not args.without and not args.scheme:
        args.parser.error("nothing is changed: give --without-uid or --with-scheme")

    async def work(network: "NetworkReader", device: str) -> int:
        from tplr.run.replay import CAVEAT, ReplayRequest, replay

        request = ReplayRequest(args.first, args.last, tuple(args.without), dict(args.scheme))
        found = await replay(network, request, device)
        print(f"{_table(found)}\n\n{CAVEAT}")  # noqa: T201 - what the command is for
        return 0

    return run_on_network(args, work)


def _constant(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError as error:
        expected = "" if separator else " (NAME=VALUE)"
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, true or false{expected}") from error


def _table(found: Sequence["Comparison"]) -> str:
    rows = [("window", "as it was", "changed", "difference", "error", "sequences")]
    rows += [
        (
            str(one.window),
            f"{one.as_it_was:.5f}",
            f"{one.changed:.5f}",
            f"{one.difference:+.5f}",
            f"{one.error:.5f}",
            str(one.sequences),
        )
        for one in found
    ]
    title = "Loss on held-out pages, in nats per token"
    return "\n".join([title, *("  ".join(f"{cell:>10}" for cell in row) for row in rows)])

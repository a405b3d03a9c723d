"""``tplr page``: one self-contained HTML file of a run."""

import argparse
from functools import partial
from pathlib import Path

from tplr.node.arguments import add_arguments as add_node_arguments
from tplr.node.arguments import node_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="the page (default: page.html; with --local: in the run's folder)")
    add("--json", type=Path, metavar="FILE", help="also write the document that the page shows")
    add("--validator", type=int, help="uid of the validator whose scores are shown (default: the leading one)")
    add(
        "--read-events",
        type=Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="event files of your own nodes, for what they alone know: training losses, and where their time goes "
        "(with --local: those of all nodes)",
    )
    add(
        "--audits", type=Path, metavar="FILE", help="file of tplr audit --record (with --local: the run's audits.jsonl)"
    )
    add("--follow", action="store_true", help="write the page again after each window, until it is interrupted")
    add("--history", type=Path, metavar="FILE", help="keep what is read in this file: buckets forget old windows")
    add("--publish", action="store_true", help="also put page and document into the bucket of R2_PAGE_*")
    add_node_arguments(parser.add_argument_group("arguments of a node, to reach the network"))


def run(args: argparse.Namespace) -> int:
    from tplr.page.command import PageRequest, main

    if args.follow and args.local:
        args.parser.error("--follow is for a running network; the run of --local is over")
    request = PageRequest(
        network=node_arguments(args),
        out=args.out or Path("page.html"),
        json=args.json,
        history=args.history,
        validator=args.validator,
        events=tuple(args.read_events),
        audits=args.audits,
        follow=args.follow,
        publish=args.publish,
    )
    surroundings = None
    if args.local:
        from tplr.errors import ConfigError
        from tplr.localnet.reopen import page_request, reopened

        try:
            request, surroundings = page_request(request, args.local, out=args.out), partial(reopened, args.local)
        except ConfigError as error:
            args.parser.error(str(error))  # exits with status 2
    return main(request, surroundings)

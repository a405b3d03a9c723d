"""``tplr page``: one self-contained HTML file of a run."""

import argparse
from pathlib import Path

from tplr.cli.network import add_network_arguments, add_results_argument, network_of, results_folder


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
    add_results_argument(parser)
    add_network_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.follow and args.local:
        args.parser.error("--follow is for a running network; the run of --local is over")
    try:
        problems = _input_problems(args)
    except OSError as error:  # a folder above it that this account may not search
        problems = [str(error)]
    if problems:
        args.parser.error("\n".join(problems))
    network, surroundings = network_of(args)
    from tplr.page.command import PageRequest, main

    request = PageRequest(
        network=network,
        out=args.out or Path("page.html"),
        json=args.json,
        history=args.history,
        validator=args.validator,
        events=tuple(args.read_events),
        audits=args.audits,
        results=results_folder(args),
        follow=args.follow,
        publish=args.publish,
    )
    if args.local:
        from tplr.localnet.reopen import page_request

        request = page_request(request, args.local, out=args.out)
    return main(request, surroundings)


def _input_problems(args: argparse.Namespace) -> list[str]:
    """Return a problem for each given file or folder to read that is none.

    With ``--follow`` it may be missing: a node, ``tplr audit`` or ``tplr eval`` that is started later creates it.
    """
    files = [("--read-events", path) for path in args.read_events] + [("--audits", args.audits)]
    given = [(name, path, "file", path.is_file()) for name, path in files if path]
    given += [("--results", path, "folder", path.is_dir()) for path in (args.results,) if path]
    return [
        f"{name} {path}: {'expected a' if path.exists() else 'no such'} {kind}"
        for name, path, kind, usable in given
        if not usable and (path.exists() or not args.follow)
    ]

"""``tplr export``: a window's model as a folder that other programs load, or a check of such a folder."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tplr.cli.network import (
    add_network_arguments,
    add_results_argument,
    results_folder,
    run_on_network,
    window_or,
)

if TYPE_CHECKING:
    from tplr.node.network_reader import NetworkReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FOLDER", help="new folder to write")
    what.add_argument("--verify", type=Path, metavar="FOLDER", help="recompute an exported folder, and compare")
    add(
        "--window",
        default="latest",
        type=window_or("latest"),
        metavar="W|latest",
        help="the last window that the model has applied (default: the newest that the leading validator reported)",
    )
    add(
        "--from",
        dest="source",
        default="nearest",
        metavar="nearest|checkpoint|start|FOLDER",
        help="where the model comes from: the leading validator's nearest checkpoint, else the first weights "
        "(default); one of these; or a node's saved state. What is missing to the window is replayed",
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the tensors (default: %(default)s)")
    add_results_argument(parser)
    add_network_arguments(parser)


def run(args: argparse.Namespace) -> int:
    async def work(network: "NetworkReader", device: str) -> int:
        from tplr.run.export import ExportRequest, export
        from tplr.run.verify import verify

        if args.verify:
            return await verify(network, args.verify, args.source, device)
        request = ExportRequest(args.window, args.source, args.out, args.dtype, results_folder(args))
        record = await export(network, request, device)
        print(f"{args.out}: window {record.window}, fingerprint {record.fingerprint}")  # noqa: T201
        return 0

    return run_on_network(args, work)

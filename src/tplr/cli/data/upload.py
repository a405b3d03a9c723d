"""``tplr data upload`` puts a dataset or a token store into the dataset bucket."""

import argparse
import asyncio
from pathlib import Path

from tplr.cli.data.location import add_subfolder_argument, open_locations
from tplr.cli.data.print_line import print_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="FOLDER", help="a dataset, or a token store with its meta.json")
    add_subfolder_argument(parser)
    parser.add_argument("--replace", action="store_true", help="replace another dataset or version in that subfolder")


def run(args: argparse.Namespace) -> int:
    return asyncio.run(_upload(args))


async def _upload(args: argparse.Namespace) -> int:
    from tplr.storage.progress import ProgressLog
    from tplr.stores.publish import publish

    async with open_locations(args, "write") as locations:
        for location in locations:
            progress = ProgressLog(f"uploading to {location.title}")
            done = await publish(args.source, location.store, location.prefix, replace=args.replace, progress=progress)
            print_line(f"{location.title}: {done.sent} files sent, {done.skipped} already there")
    return 0

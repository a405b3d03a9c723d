"""``tplr data verify`` compares a dataset or a token store with its manifest."""

import argparse
import asyncio

from tplr.cli.data.location import add_folder_argument, add_subfolder_argument, open_locations
from tplr.cli.data.print_line import print_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder_argument(parser, "verify")
    add_subfolder_argument(parser)
    parser.add_argument("--quick", action="store_true", help="check sizes and row groups only; read no complete file")


def run(args: argparse.Namespace) -> int:
    return asyncio.run(_verify(args))


async def _verify(args: argparse.Namespace) -> int:
    """Return 0 if there is no problem, else 1."""
    from tplr.storage.progress import ProgressLog
    from tplr.stores.verify import verify

    status = 0
    async with open_locations(args, "read") as locations:
        for location in locations:
            progress = ProgressLog(f"verifying {location.title}")
            found = await verify(location.store, location.prefix, hashes=not args.quick, progress=progress)
            for problem in found.problems:
                print_line(f"{location.title}: {problem}")
            for path in found.unlisted:
                print_line(f"{location.title}: note: {path} is in no manifest")
            if found.unhashed and not args.quick:
                print_line(f"{location.title}: note: {len(found.unhashed)} files have no hash in the manifest")
            print_line(
                f"{location.title}: {found.files} files, {found.bytes / 1e6:.1f} MB, {len(found.problems)} problems"
            )
            if found.manifest:
                print_line(f"{location.title}: the manifest's SHA-256 is {found.manifest.sha256}")
            status = max(status, int(bool(found.problems)))
    return status

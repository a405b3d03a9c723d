"""``tplr data verify``: is everything there, and as the manifest says?"""

import argparse
import asyncio

from tplr.cli.data.place import add_folder, add_subfolder, open_places
from tplr.cli.data.say import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser, "look at")
    add_subfolder(parser)
    parser.add_argument("--quick", action="store_true", help="sizes and row groups only; read no whole file")


def run(args: argparse.Namespace) -> int:
    return asyncio.run(_verify(args))


async def _verify(args: argparse.Namespace) -> int:
    """0 if all places are well, 1 otherwise."""
    from tplr.storage.progress import log_progress
    from tplr.stores.verify import verify

    status = 0
    async with open_places(args, "read") as places:
        for place in places:
            progress = log_progress(f"verifying {place.title}")
            found = await verify(place.store, place.prefix, hashes=not args.quick, progress=progress)
            for problem in found.problems:
                say(f"{place.title}: {problem}")
            for path in found.unlisted:
                say(f"{place.title}: note: {path} is in no manifest")
            if found.unhashed and not args.quick:
                say(f"{place.title}: note: {len(found.unhashed)} files have no hash in the manifest")
            say(f"{place.title}: {found.files} files, {found.bytes / 1e6:.1f} MB, {len(found.problems)} problems")
            if found.manifest:
                say(f"{place.title}: the manifest's SHA-256 is {found.manifest.sha256}")
            status = max(status, int(bool(found.problems)))
    return status

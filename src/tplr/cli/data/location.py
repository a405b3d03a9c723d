"""The location of a command's dataset: a local folder, or the dataset bucket of the environment."""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tplr.config import Access, Environment
from tplr.errors import ConfigError

if TYPE_CHECKING:
    from tplr.storage import ObjectStore


@dataclass(frozen=True)
class DatasetLocation:
    """An object store and the prefix of the dataset's keys; ``title`` is for messages."""

    store: "ObjectStore"
    prefix: str
    title: str


def add_folder_argument(parser: argparse.ArgumentParser, says: str) -> None:
    parser.add_argument("--folder", type=Path, help=f"{says} this local folder instead of the dataset bucket")


def add_subfolder_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--subfolder", metavar="PREFIX", help="prefix in the bucket (default: TPLR_DATASET_SUBFOLDER)")


@contextlib.asynccontextmanager
async def open_locations(args: argparse.Namespace, access: Access) -> AsyncIterator[list[DatasetLocation]]:
    """Open the folder, or all replicas of the dataset bucket.

    Raises:
        ConfigError: there is no such folder, or a variable of the environment is missing.
    """
    from tplr.storage import S3Connections
    from tplr.stores.expected_files import local_prefix

    folder: Path | None = getattr(args, "folder", None)
    if folder is not None:
        if not await asyncio.to_thread(folder.is_dir):
            raise ConfigError(f"{folder}: no such folder")
        yield [DatasetLocation(*local_prefix(folder), title=str(folder))]
        return
    environment = Environment.read()
    at = environment.dataset(access, args.subfolder)
    async with S3Connections.of(environment) as connections:
        yield [
            DatasetLocation(connections.store(bucket), at.subfolder, f"{bucket.name}/{at.subfolder}")
            for bucket in at.replicas
        ]

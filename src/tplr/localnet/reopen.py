"""Opens a localnet for readers: uses its running storage server, or starts one for the duration of the block.

Several commands may read a finished run at once; each has a server of its own.
"""

import argparse
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tplr.config import Environment, process_variables
from tplr.errors import ConfigError
from tplr.localnet.dataset import SUBFOLDER
from tplr.localnet.kept import check_kept
from tplr.localnet.network import HOTKEY, READY_FILE, base_environment
from tplr.node.arguments import Arguments, add_arguments, node_arguments
from tplr.node.network_reader import NetworkReader, open_network
from tplr.page.command import PageRequest
from tplr.testing.s3server import FolderInUse, serve

PAGE = "page.html"


def reader_arguments(args: Arguments, run: Path) -> Arguments:
    """Return ``args`` for the network of a run's folder, as its validator sees it; old blocks are readable.

    Raises:
        ConfigError: the folder holds no run, or one whose buckets were deleted.
    """
    check_kept(run)
    return replace(
        args,
        hparams=run / "hparams.json",
        network=f"local:{run / 'chain.sqlite'}",
        archive=("local",),
        wallet_path=run / "wallets",
        wallet_name="validator",
        wallet_hotkey=HOTKEY,
        device="cpu",
    )


def page_request(request: PageRequest, run: Path, *, out: Path | None = None) -> PageRequest:
    """Return ``request`` for a run's folder: with all nodes' events; the page goes into the folder or to ``out``."""
    return replace(
        request,
        out=out or run / PAGE,
        events=request.events or tuple(sorted((run / "events").glob("*.jsonl"))),
        audits=request.audits or run / "audits.jsonl",
    )


def own_page(run: Path) -> PageRequest:
    """Return the request for the page of a run that has just ended. Raises ConfigError as ``reader_arguments``."""
    return page_request(PageRequest(network=_own_arguments(run), out=run / PAGE), run)


@asynccontextmanager
async def reopened(run: Path) -> AsyncIterator[Environment]:
    """Yield a reader's environment for the run in this folder; its storage server runs until the block ends."""
    table = json.loads((run / "keys.json").read_text())
    async with _storage(run, table) as endpoint:
        yield Environment(
            {
                **base_environment(process_variables(), run / "home"),
                "TPLR_S3_ENDPOINT": endpoint,
                "TPLR_DATASET_SUBFOLDER": SUBFOLDER,
                **_read_variables(table, "aggregator"),
                **_read_variables(table, "dataset"),
            }
        )


@asynccontextmanager
async def _storage(run: Path, keys: Mapping[str, Any]) -> AsyncIterator[str]:
    """Yield the endpoint of the run's storage: the localnet's own server while it runs, else a server started here."""
    async with AsyncExitStack() as stack:
        try:
            endpoint = (await stack.enter_async_context(serve(run / "storage", keys, shared=True))).endpoint
        except FolderInUse:
            facts = json.loads((run / READY_FILE).read_text())
            endpoint = f"http://{facts['host']}:{facts['port']}"
        yield endpoint


@asynccontextmanager
async def open_finished(run: Path) -> AsyncIterator[NetworkReader]:
    """Open the run in this folder for reading by a program, as ``--local`` does for a command.

    Raises:
        ConfigError: as ``reader_arguments``.
    """
    async with reopened(run) as environment, open_network(_own_arguments(run), environment) as network:
        yield network


def _own_arguments(run: Path) -> Arguments:
    """Return a reader's arguments for the run in this folder. Raises ConfigError as ``reader_arguments``."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.set_defaults(command="reader")
    return reader_arguments(node_arguments(parser.parse_args(["--local", str(run)])), run)


def _read_variables(table: Mapping[str, Any], bucket: str) -> dict[str, str]:
    """Return the variables of a bucket whose name is its kind, with its read key."""
    for access_key_id, entry in table.items():
        if entry["buckets"].get(bucket) == "read":
            prefix = f"R2_{bucket.upper()}"
            return {
                f"{prefix}_BUCKET_NAME": bucket,
                f"{prefix}_READ_ACCESS_KEY_ID": access_key_id,
                f"{prefix}_READ_SECRET_ACCESS_KEY": entry["secret"],
            }
    raise ConfigError(f"keys.json has no read key of the bucket {bucket}")

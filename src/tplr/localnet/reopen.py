"""Opens a localnet for readers: its storage server, or one that runs again while the block lasts."""

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
from tplr.localnet.network import HOTKEY, READY_FILE, base_environment
from tplr.node.arguments import Arguments, add_arguments, node_arguments
from tplr.node.network_reader import NetworkReader, open_network
from tplr.page.command import PageRequest
from tplr.testing.s3server import FolderInUse, serve

PAGE = "page.html"


def reader_arguments(args: Arguments, run: Path) -> Arguments:
    """``args`` for the network of a run's folder, as its validator sees it; old blocks are readable.

    Raises:
        ConfigError: the folder holds no run, or one whose buckets were deleted.
    """
    for name in ("hparams.json", "chain.sqlite", "keys.json", "storage", "wallets"):
        if not (run / name).exists():
            raise ConfigError(
                f"{run}: no {name}, so no localnet whose buckets were kept (without --keep results) is in there: give "
                "--local FOLDER of another run"
            )
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
    """``request`` for a run's folder: with all nodes' events, and in the folder itself unless ``out`` is given."""
    return replace(
        request,
        out=out or run / PAGE,
        events=request.events or tuple(sorted((run / "events").glob("*.jsonl"))),
        audits=request.audits or run / "audits.jsonl",
    )


def own_page(run: Path) -> PageRequest:
    """The request for the page of a run that has just ended. Raises ConfigError, as ``reader_arguments``."""
    return page_request(PageRequest(network=_own_arguments(run), out=run / PAGE), run)


@asynccontextmanager
async def reopened(run: Path) -> AsyncIterator[Environment]:
    """The environment of a reader of the run in this folder, whose storage server runs until the block ends."""
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
    """The endpoint of the run's storage: of its own server while the localnet runs, else of one of ours."""
    async with AsyncExitStack() as stack:
        try:
            endpoint = (await stack.enter_async_context(serve(run / "storage", keys))).endpoint
        except FolderInUse:
            facts = json.loads((run / READY_FILE).read_text())
            endpoint = f"http://{facts['host']}:{facts['port']}"
        yield endpoint


@asynccontextmanager
async def open_finished(run: Path) -> AsyncIterator[NetworkReader]:
    """The run in this folder, open for reading, for a program; as ``--local`` does for a command.

    Raises:
        ConfigError: as ``reader_arguments``.
    """
    async with reopened(run) as environment, open_network(_own_arguments(run), environment) as network:
        yield network


def _own_arguments(run: Path) -> Arguments:
    """Those of a reader of the run in this folder, else the defaults. Raises ConfigError, as ``reader_arguments``."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.set_defaults(command="reader")
    return reader_arguments(node_arguments(parser.parse_args(["--local", str(run)])), run)


def _read_variables(table: Mapping[str, Any], bucket: str) -> dict[str, str]:
    """The variables of a bucket that is called like its kind, with its read key."""
    for access_key_id, entry in table.items():
        if entry["buckets"].get(bucket) == "read":
            prefix = f"R2_{bucket.upper()}"
            return {
                f"{prefix}_BUCKET_NAME": bucket,
                f"{prefix}_READ_ACCESS_KEY_ID": access_key_id,
                f"{prefix}_READ_SECRET_ACCESS_KEY": entry["secret"],
            }
    raise ConfigError(f"keys.json has no read key of the bucket {bucket}")

"""Emits the event ``pulse`` once a window: measurements of the node that no other event contains."""

import asyncio
import shutil
from collections import Counter
from pathlib import Path

from tplr.node.gpus import read_gpus
from tplr.node.replica import NodeContext
from tplr.storage import S3Connections


async def beat(context: NodeContext, connections: S3Connections, folder: Path) -> None:
    """Emit the events until cancelled. If they are missing, the chain or the node has stopped.

    Args:
        folder: of the saved state; the free space of its disk is reported.
    """
    clock = context.clock
    async for tick in clock.ticks():
        results, connections.results = connections.results, Counter()
        free, gpus = await asyncio.to_thread(lambda: (_free_bytes(folder), read_gpus()))
        context.telemetry.emit(
            "pulse",
            window=tick.window,
            block=clock.block,
            block_age=clock.seconds_since_block(),
            seconds_left=clock.seconds_left(),
            window_seconds=clock.blocks_per_window * clock.block_time,
            free_bytes=free,
            storage_requests=dict(results),
            gpus=gpus,
        )


def _free_bytes(folder: Path) -> int | None:
    """Of the disk; None if it does not answer: a node goes on while its disk fails."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None

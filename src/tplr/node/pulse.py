"""Emits the event ``pulse`` once a window: measurements of the node that no other event contains."""

import asyncio
import shutil
from collections import Counter, deque
from pathlib import Path

from tplr.node.gpus import GpuMeasures, of_window, read_gpus
from tplr.node.replica import NodeContext
from tplr.storage import S3Connections

SAMPLES = 64  # of the GPUs in a window
MIN_SAMPLE_SECONDS = 1.0  # the driver's utilisation is that of up to the last second


async def beat(context: NodeContext, connections: S3Connections, folder: Path) -> None:
    """Emit the events until cancelled. If they are missing, the chain or the node has stopped.

    Args:
        folder: of the saved state; the free space of its disk is reported.
    """
    clock = context.clock
    window_seconds = clock.blocks_per_window * clock.block_time
    samples = deque[GpuMeasures](maxlen=2 * SAMPLES)  # no more while the chain is silent
    async with asyncio.TaskGroup() as group:
        sampling = group.create_task(_sample(samples, max(MIN_SAMPLE_SECONDS, window_seconds / SAMPLES)))
        async for tick in clock.ticks():
            results, connections.results = connections.results, Counter()
            free = await asyncio.to_thread(_free_bytes, folder)
            gpus = of_window(samples) if samples else await asyncio.to_thread(read_gpus)
            samples.clear()
            context.telemetry.emit(
                "pulse",
                window=tick.window,
                block=clock.block,
                block_age=clock.seconds_since_block(),
                seconds_left=clock.seconds_left(),
                window_seconds=window_seconds,
                free_bytes=free,
                storage_requests=dict(results),
                gpus=gpus,
            )
        sampling.cancel()


async def _sample(samples: deque[GpuMeasures], seconds: float) -> None:
    """Append measures of the GPUs every ``seconds`` until cancelled.

    A miner that does not overlap windows is idle when the event is emitted, so one sample at that time says little.
    """
    while True:
        samples.append(await asyncio.to_thread(read_gpus))
        await asyncio.sleep(seconds)


def _free_bytes(folder: Path) -> int | None:
    """Of the disk; None if it does not answer: a node goes on while its disk fails."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None

"""Groups the chunks of an async stream, so that a thread gets enough work at a time."""

from collections.abc import AsyncIterator

BATCH_BYTES = 1 << 20


async def batches(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Lists of uncopied chunks that hold at least ``BATCH_BYTES`` together, except for the last one."""
    batch: list[bytes] = []
    held = 0
    async for chunk in chunks:
        batch.append(chunk)
        held += len(chunk)
        if held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch

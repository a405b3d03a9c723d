"""Groups the chunks of an async stream, so that each call in a thread gets enough work."""

from collections.abc import AsyncIterator

BATCH_BYTES = 1 << 20


async def batches(chunks: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Yield lists of uncopied chunks with at least ``BATCH_BYTES`` bytes each, except the last."""
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

"""Aborts multipart uploads that a killed node left unfinished: they are invisible, but stored and billed."""

import asyncio

from tplr.errors import StoreError
from tplr.logging import logger
from tplr.storage import ObjectStore, abort_uploads

# A more recent upload may be resumed when this node publishes the same snapshot again.
AGE_SECONDS = 3600.0
TIME_LIMIT_SECONDS = 60.0


async def abort_stale_uploads(store: ObjectStore) -> None:
    """Abort unfinished uploads without a new part for ``AGE_SECONDS``; gives up after ``TIME_LIMIT_SECONDS``."""
    try:
        async with asyncio.timeout(TIME_LIMIT_SECONDS):
            aborted = await abort_uploads(store, older_than_seconds=AGE_SECONDS)
    except (StoreError, TimeoutError) as error:
        logger.warning("stale unfinished uploads not aborted: %s", str(error) or "the store took too long")
    else:
        if aborted:
            logger.info("aborted %d stale unfinished uploads", aborted)

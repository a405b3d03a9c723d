"""What a node that was killed left half uploaded: nobody sees it, but it is stored and paid for until it is aborted."""

import asyncio

from tplr.errors import StoreError
from tplr.logging import logger
from tplr.storage import ObjectStore, abort_uploads

# A younger upload may be gone on with, when this node publishes the same snapshot again.
AGE_SECONDS = 3600.0
TIME_LIMIT_SECONDS = 60.0


async def abort_leftovers(store: ObjectStore) -> None:
    """Abort the old unfinished uploads of this node's bucket. What can't be done in time is left to the next start."""
    try:
        async with asyncio.timeout(TIME_LIMIT_SECONDS):
            aborted = await abort_uploads(store, older_than_seconds=AGE_SECONDS)
    except (StoreError, TimeoutError) as error:
        logger.warning("old unfinished uploads are not aborted: %s", str(error) or "the store took too long")
    else:
        if aborted:
            logger.info("aborted %d old unfinished uploads", aborted)

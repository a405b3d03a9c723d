"""JSON documents in buckets: each of a schema, which bounds its size too."""

import asyncio
import hashlib
from collections.abc import Awaitable
from typing import TypeVar

from tplr.errors import PreconditionFailed
from tplr.schemas import Document
from tplr.storage import ObjectStore
from tplr.storage.retry import with_retry
from tplr.untrusted import parse_untrusted

READ_SECONDS = 10.0
PUT_DEADLINE_SECONDS = 30.0

DocumentT = TypeVar("DocumentT", bound=Document)


async def put_document(store: ObjectStore, key: str, document: Document, *, create_only: bool = False) -> None:
    """Write a document. With ``create_only``, raises PreconditionFailed if the key holds another one."""
    body = document.model_dump_json().encode()
    try:
        await with_retry(lambda: store.put(key, body, create_only=create_only), deadline_seconds=PUT_DEADLINE_SECONDS)
    except PreconditionFailed:
        # A lost answer: the second attempt found what the first one wrote.
        there = await with_retry(lambda: store.head(key), deadline_seconds=PUT_DEADLINE_SECONDS)
        if there.etag != hashlib.md5(body, usedforsecurity=False).hexdigest():
            raise


async def get_document(store: ObjectStore, key: str, schema: type[DocumentT], *, retry: bool = False) -> DocumentT:
    """Read the document at ``key``.

    Args:
        retry: while the store is unavailable, for up to ``READ_SECONDS``. Not for callers that poll.

    Raises:
        PayloadError: the object does not fit the schema.
        StoreError: as ``ObjectStore.get``; ObjectTooLarge above ``schema.max_bytes``.
    """

    def read() -> Awaitable[bytes]:
        return store.get(key, max_bytes=schema.max_bytes)

    body = await (with_retry(read, deadline_seconds=READ_SECONDS) if retry else read())
    return await asyncio.to_thread(parse_untrusted, body, schema, key)

"""Documents in buckets: each is signed by its author and has a schema that bounds its size."""

import asyncio
from collections.abc import Awaitable

from tplr.errors import ObjectTooLarge, PayloadError, PreconditionFailed
from tplr.exchange.envelope import (
    Author,
    DocumentT,
    Signed,
    Signer,
    body_sha256,
    envelope_cap,
    open_document,
    sign_document,
)
from tplr.schemas import Document
from tplr.storage import ObjectStore, TransferLimits
from tplr.storage.retry import with_retry

# Time limit of a request without a body; a document gets more time in proportion to its size.
READ_SECONDS = 10.0
PUT_SECONDS = 30.0


async def put_document(
    store: ObjectStore, key: str, document: Document, *, window: int, signer: Signer, create_only: bool = False
) -> None:
    """Sign a document about ``window`` and write it.

    Args:
        create_only: raise PreconditionFailed if the key holds a different document. An equal one stays unchanged.

    Raises:
        StoreError: the document is not written.
        ObjectTooLarge: the document is larger than readers accept.
    """
    raw = await asyncio.to_thread(sign_document, document, window=window, signer=signer)
    if len(raw) > envelope_cap(document.max_bytes):
        raise ObjectTooLarge(f"{len(raw)} bytes, at most {document.max_bytes} are read", bucket=store.name, key=key)
    try:
        await with_retry(
            lambda: store.put(key, raw, create_only=create_only),
            deadline_seconds=PUT_SECONDS + len(raw) / TransferLimits.upload_floor,
        )
    except PreconditionFailed:
        # The response to the first attempt was lost, or the document was written before a restart.
        if not await holds_document(store, key, document, window=window, author=signer):
            raise


async def holds_document(store: ObjectStore, key: str, document: Document, *, window: int, author: Author) -> bool:
    """Return whether the key holds this document, signed by ``author``. Raises StoreError."""
    try:
        there = await get_signed(store, key, type(document), window=window, author=author, retry=True)
    except (PayloadError, ObjectTooLarge):
        return False
    return there.sha256 == await asyncio.to_thread(body_sha256, document)


async def get_document(
    store: ObjectStore, key: str, schema: type[DocumentT], *, window: int, author: Author, retry: bool = False
) -> DocumentT:
    """Read the document at ``key``; arguments and errors as ``get_signed``."""
    return (await get_signed(store, key, schema, window=window, author=author, retry=retry)).document


async def get_signed(
    store: ObjectStore,
    key: str,
    schema: type[DocumentT],
    *,
    window: int,
    author: Author,
    max_bytes: int | None = None,
    retry: bool = False,
) -> Signed[DocumentT]:
    """Read the document at ``key`` with its envelope.

    Args:
        max_bytes: maximum size of the document; default: the schema's.
        retry: retry for about ``READ_SECONDS`` while the store is unavailable. Not for callers that poll.

    Raises:
        PayloadError: the object is not a valid document of this schema about ``window``, signed by ``author``.
        StoreError: as ``ObjectStore.get``; ObjectTooLarge above ``max_bytes``.
    """
    cap = schema.max_bytes if max_bytes is None else max_bytes

    def read() -> Awaitable[bytes]:
        return store.get(key, max_bytes=envelope_cap(cap))

    seconds = READ_SECONDS + cap / TransferLimits.download_floor
    raw = await (with_retry(read, deadline_seconds=seconds) if retry else read())
    try:
        return await asyncio.to_thread(open_document, raw, schema, window=window, author=author, max_bytes=cap)
    except PayloadError as error:
        raise PayloadError(f"{key}: {error}") from error

"""A document is written once, even if responses get lost; its signature identifies its kind."""

from collections.abc import Mapping

import pytest
from signers import signed, signer

from tplr.errors import ObjectNotFound, ObjectTooLarge, PayloadError, PreconditionFailed, StoreUnavailable
from tplr.exchange.documents import get_document, get_signed, holds_document, put_document
from tplr.exchange.envelope import MAX_HEADER_BYTES, Author, body_sha256
from tplr.schemas import ObjectInfo, PeerList, StartWindow
from tplr.storage import MemoryStore, ObjectStore

ME, OTHER = signer(), signer(6)


async def put(store: ObjectStore, start: int, *, create_only: bool = True) -> None:
    await put_document(store, "doc", StartWindow(start_window=start), window=0, signer=ME, create_only=create_only)


async def read(store: ObjectStore, author: Author = ME) -> int:
    return (await get_document(store, "doc", StartWindow, window=0, author=author)).start_window


class LosesAnswers(MemoryStore):
    """Stores the first put, but reports an unknown result."""

    lost = False

    async def put(
        self, key: str, data: bytes, *, metadata: Mapping[str, str] | None = None, create_only: bool = False
    ) -> ObjectInfo:
        info = await super().put(key, data, metadata=metadata, create_only=create_only)
        if not self.lost:
            self.lost = True
            raise StoreUnavailable("the answer got lost")
        return info


@pytest.mark.parametrize("create_only", [True, False])
async def test_a_lost_answer_is_settled(create_only: bool) -> None:
    store = LosesAnswers()
    await put(store, 3, create_only=create_only)
    assert await read(store) == 3


async def test_another_document_is_never_overwritten() -> None:
    store = LosesAnswers()
    await put(store, 3)
    with pytest.raises(PreconditionFailed):
        await put(store, 4)
    assert await read(store) == 3


async def test_the_same_document_stays_with_its_first_signature() -> None:
    """As after a restart, because every signature differs."""
    store = MemoryStore()
    await put(store, 3)
    before = await store.head("doc")
    await put(store, 3)
    assert (await store.head("doc")).etag == before.etag


@pytest.mark.parametrize(
    "there",
    [
        b"",
        b'{"start_window":3}',
        b" " * (2**16 + MAX_HEADER_BYTES + 1),
        signed(StartWindow(start_window=3), StartWindow, window=0, by=OTHER),
        signed(b'{"start_window": 3}', StartWindow, window=0, by=ME),
    ],
)
async def test_what_this_author_did_not_sign_is_not_its_document(there: bytes) -> None:
    store = MemoryStore()
    await store.put("doc", there)
    assert not await holds_document(store, "doc", StartWindow(start_window=3), window=0, author=ME)
    with pytest.raises(PreconditionFailed):
        await put(store, 3)
    with pytest.raises((PayloadError, ObjectTooLarge), match=r"doc"):
        await read(store)


async def test_the_envelope_is_read_with_the_document() -> None:
    store = MemoryStore()
    await put(store, 3)
    found = await get_signed(store, "doc", StartWindow, window=0, author=ME)
    assert found.raw == await store.get("doc", max_bytes=1000)
    assert found.sha256 == body_sha256(found.document)


async def test_a_missing_document_is_no_payload() -> None:
    with pytest.raises(ObjectNotFound):
        await read(MemoryStore())


async def test_a_document_that_nobody_would_read_is_not_written() -> None:
    store, uids = MemoryStore("mine"), (65535,) * 4096
    many = PeerList(
        peers=uids,
        reserve_peers=uids,
        probation=uids,
        initial_selection=False,
        sync_window=1,
        first_effective_window=1,
    )
    with pytest.raises(ObjectTooLarge, match=r"mine/doc: 7.* bytes, at most 65536 are read"):
        await put_document(store, "doc", many, window=1, signer=ME)
    assert await store.list() == []


async def test_a_reader_may_allow_less_than_the_schema() -> None:
    store = MemoryStore()
    await put(store, 3)
    with pytest.raises(ObjectTooLarge):
        await get_signed(store, "doc", StartWindow, window=0, author=ME, max_bytes=-MAX_HEADER_BYTES + 100)

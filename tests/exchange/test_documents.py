"""A document is written once, however often its answer gets lost on the way."""

from collections.abc import Mapping

import pytest

from tplr.errors import PreconditionFailed, StoreUnavailable
from tplr.exchange.documents import get_document, put_document
from tplr.schemas import ObjectInfo, StartWindow
from tplr.storage import MemoryStore


class LosesAnswers(MemoryStore):
    """Stores the first put, and says that it does not know."""

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
    await put_document(store, "doc", StartWindow(start_window=3), create_only=create_only)
    assert (await get_document(store, "doc", StartWindow)).start_window == 3


async def test_another_document_is_never_overwritten() -> None:
    store = LosesAnswers()
    await put_document(store, "doc", StartWindow(start_window=3), create_only=True)
    with pytest.raises(PreconditionFailed):
        await put_document(store, "doc", StartWindow(start_window=4), create_only=True)
    assert (await get_document(store, "doc", StartWindow)).start_window == 3

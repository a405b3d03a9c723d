"""Reads an object of a bucket in pieces."""

from tplr.storage.blocking import BucketConnections, StoreObject
from tplr.streams.sources.bytes import FIRST_FETCHED, MAX_FETCHED, FetchedPieces


class StorePieces(FetchedPieces):
    """An object in pieces. A retry fetches the same piece, so no byte is lost or repeated."""

    def __init__(  # noqa: PLR0917
        self, stores: BucketConnections, url: str, offset: int, version: str, timeout: float, ahead: bool
    ) -> None:
        super().__init__(lambda: stores.submit(self._fetch()), offset, ahead)
        self._object = StoreObject(stores, url, timeout, version)
        self._at = offset
        self._piece = FIRST_FETCHED
        self.version = version

    async def _fetch(self) -> bytes:
        data = await self._object.get(self._at, self._piece)
        self.version = await self._object.version()
        self._at += len(data)
        self._piece = min(2 * self._piece, MAX_FETCHED)
        return data

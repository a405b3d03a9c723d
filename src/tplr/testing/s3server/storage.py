"""What the operations work on: objects, uploads, and the rules they are held to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tplr.testing.s3server.blobfile import Draft
from tplr.testing.s3server.multipart import UploadStore
from tplr.testing.s3server.objects import ObjectStore
from tplr.testing.s3server.request import S3Request
from tplr.testing.s3server.rules import Rules, WriteRate


class Storage:
    """What the operations work on."""

    def __init__(self, objects: ObjectStore, rules: Rules) -> None:
        self.objects = objects
        self.uploads = UploadStore(objects, rules)
        self.rules = rules
        self._rate = WriteRate()

    def admit_write(self, request: S3Request) -> None:
        """At most one write a second for each key."""
        if self.rules.one_write_per_second:
            self._rate.admit(request.bucket, request.key, self.objects.now())

    @asynccontextmanager
    async def draft(self) -> AsyncIterator[Draft]:
        """A draft that is gone at the end, unless it was published."""
        draft = await asyncio.to_thread(self.objects.draft)
        try:
            yield draft
        finally:
            await asyncio.to_thread(draft.discard)

"""The state that operations work on: objects, uploads, and the rules."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tplr.testing.s3server.blobfile import Draft
from tplr.testing.s3server.multipart import UploadFiles
from tplr.testing.s3server.objects import ObjectFiles
from tplr.testing.s3server.request import S3Request
from tplr.testing.s3server.rules import Rules, WriteRate


class Storage:
    """Objects and uploads of one server, and its rules."""

    def __init__(self, objects: ObjectFiles, rules: Rules) -> None:
        self.objects = objects
        self.uploads = UploadFiles(objects, rules)
        self.rules = rules
        self._rate = WriteRate()

    def admit_write(self, request: S3Request) -> None:
        """Raises TooManyRequests for a second write to a key within a second."""
        if self.rules.one_write_per_second:
            self._rate.admit(request.bucket, request.key, self.objects.now())

    @asynccontextmanager
    async def draft(self) -> AsyncIterator[Draft]:
        """A draft that is discarded at the end unless it is published."""
        draft = await asyncio.to_thread(self.objects.draft)
        try:
            yield draft
        finally:
            await asyncio.to_thread(draft.discard)

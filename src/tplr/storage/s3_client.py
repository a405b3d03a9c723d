"""Sends S3 requests for one bucket with one credential: signed, bounded in time, with translated errors."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self, TypeVar
from urllib.parse import urlsplit

from tplr.errors import AccessDenied, StoreError
from tplr.logging import TRACE, logger
from tplr.schemas import Bucket
from tplr.storage.base import check_key
from tplr.storage.progress import ProgressLog
from tplr.storage.s3_body import Body
from tplr.storage.s3_errors import translate_errors
from tplr.storage.s3_http import ConnectionPool, HttpRequest, TransferLimits
from tplr.storage.s3_response import METADATA_PREFIX, S3Response
from tplr.storage.s3_sign import encode_target, sign

R = TypeVar("R", bound=S3Response)
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class S3Client:
    """Sends requests to one bucket.

    Attributes:
        renew: see ``BucketLocation``.
    """

    bucket: Bucket
    endpoint: str
    region: str
    pool: ConnectionPool
    limits: TransferLimits
    renew: Callable[[], Bucket] | None = None

    def within(self, seconds: float) -> Self:
        """Return a copy of the client with another ``call_seconds``."""
        return replace(self, limits=replace(self.limits, call_seconds=seconds))

    async def send(
        self,
        method: str,
        response: R,
        headers: Mapping[str, str] = NOTHING,
        *,
        query: Mapping[str, str] = NOTHING,
        body: Body | None = None,
        sha256: str | None = None,
    ) -> R:
        """Send a request; return ``response`` when it has arrived.

        Args:
            sha256: the body's, 64 hex digits; the store refuses a body that does not match.

        Raises:
            StoreError: as ``translate_errors`` and the response.
        """
        if "prefix" in query:
            target = encode_target(self.bucket.name, "", query)
        else:
            check_key(response.key)
            target = encode_target(self.bucket.name, response.key, query)
        headers = {**headers, **response.conditions}
        bucket = await asyncio.to_thread(self.renew) if self.renew else self.bucket
        signed = sign(
            bucket,
            region=self.region,
            method=method,
            host=urlsplit(self.endpoint).netloc,
            target=target,
            headers=headers if body is None else {**headers, "content-length": str(body.size)},
            sha256=sha256,
        )
        # A transfer of parts or ranges reports its own total progress.
        whole = not query and "Range" not in headers
        progress = ProgressLog(f"{method} {self.bucket.name}/{response.key}") if whole else None
        request = HttpRequest(
            method,
            self.endpoint,
            target,
            signed,
            pool=self.pool,
            receiver=response,
            limits=self.limits,
            body=body,
            progress=progress,
        )
        try:
            with translate_errors(bucket.name, response.key):
                await request.run()
        except StoreError as error:
            self.pool.results[type(error).__name__] += 1
            if bucket.access_key_id or not isinstance(error, AccessDenied):
                raise
            raise AccessDenied(
                "no credentials were found, and it is not public: set R2_… or AWS_… variables, or a profile in ~/.aws",
                bucket=bucket.name,
                key=response.key,
            ) from error
        self.pool.results["ok"] += 1
        logger.log(TRACE, "%s %s/%s: %d", method, self.bucket.name, response.key, response.status)
        return response


def metadata_headers(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that set an object's user metadata."""
    return {f"{METADATA_PREFIX}{name}": value for name, value in metadata.items()}

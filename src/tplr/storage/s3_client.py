"""S3 requests for one bucket with one credential: signed, bounded in time, with our errors."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element

from tplr.logging import TRACE, logger
from tplr.schemas import Bucket
from tplr.storage.progress import log_progress
from tplr.storage.s3_body import Body
from tplr.storage.s3_errors import translate_errors
from tplr.storage.s3_http import Deadline, HttpRequest, Transport
from tplr.storage.s3_response import DocumentReceiver, Receiver
from tplr.storage.s3_sign import encode_target, sign

R = TypeVar("R", bound=Receiver)
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class TransferLimits:
    """How long a request may take when its caller does not say.

    Attributes:
        call_seconds: until the response; all of a request that carries no body.
        grace_seconds: after which a download has to keep up with ``download_floor``.
        download_floor: bytes per second, over the whole body so far.
        upload_floor: bytes per second; an upload has ``call_seconds`` plus ``size / upload_floor``.
    """

    call_seconds: float = 30.0
    grace_seconds: float = 2.0
    download_floor: float = 2**20
    upload_floor: float = 2**17


@dataclass(frozen=True)
class S3Client:
    """Sends requests to one bucket. Raises what ``translate_errors`` and the request's receiver raise."""

    bucket: Bucket
    endpoint: str
    region: str
    transport: Transport
    limits: TransferLimits

    async def send(
        self,
        method: str,
        receiver: R,
        headers: Mapping[str, str] = NOTHING,
        *,
        path_key: str | None = None,
        query: Mapping[str, str] = NOTHING,
        body: Body | None = None,
        sha256: str | None = None,
        timeout: float | None = None,
    ) -> R:
        """Send a request for the receiver's key; returns the receiver when it has everything.

        Args:
            path_key: the key in the path, if it is not the receiver's; "" for the bucket itself.
            sha256: of the body, 64 hex digits: the store refuses another body.
            timeout: seconds, absolute for the whole request; replaces the limits but for a download's floor.
        """
        key, size = receiver.key, body.size if body else 0
        target = encode_target(self.bucket.name, key if path_key is None else path_key, query)
        length = {} if body is None else {"content-length": str(size)}
        signed = sign(
            self.bucket,
            region=self.region,
            method=method,
            host=urlsplit(self.endpoint).netloc,
            target=target,
            headers={**headers, **length},
            sha256=sha256,
        )
        request = HttpRequest(
            method,
            target,
            signed,
            receiver=receiver,
            deadline=self._deadline(size, timeout),
            body=body,
            # Whoever transfers parts or ranges reports the whole.
            progress=None if query or "Range" in headers else log_progress(f"{method} {self.bucket.name}/{key}"),
        )
        with translate_errors(self.bucket.name, key):
            await self.transport.send(self.endpoint, request)
        logger.log(TRACE, "%s %s/%s: %d", method, self.bucket.name, key, receiver.headers.status)
        return receiver

    async def document(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str] = NOTHING,
        *,
        path_key: str | None = None,
        body: Body | None = None,
        sha256: str | None = None,
        timeout: float | None = None,
    ) -> Element:
        """As ``send``; returns the root of the XML document in the response."""
        receiver = DocumentReceiver(self.bucket.name, key)
        await self.send(
            method, receiver, headers, path_key=path_key, query=query, body=body, sha256=sha256, timeout=timeout
        )
        return receiver.root

    def _deadline(self, upload_size: int, timeout: float | None) -> Deadline:
        limits, now = self.limits, time.monotonic()
        seconds = limits.call_seconds + upload_size / limits.upload_floor if timeout is None else timeout
        end_by = math.inf if timeout is None else now + timeout
        return Deadline(now + seconds, end_by, limits.grace_seconds, limits.download_floor)

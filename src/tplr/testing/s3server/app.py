"""Handles every request: fault, signature, rights, checks of parameters and headers, operation, reply."""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from typing import TextIO

from aiohttp import web

from tplr.testing.s3server.blobfile import FileSlice
from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.faults import (
    Action,
    ConnectionCut,
    DamagedContent,
    Delay,
    Faults,
    FlipSentBit,
    IgnoreDigests,
    Instead,
    LoseResponse,
    Reset,
    Status,
    break_connection,
    damage,
)
from tplr.testing.s3server.keys import GRANTS, AccessKey, KeyTable
from tplr.testing.s3server.operations import OPERATIONS, Operation
from tplr.testing.s3server.request import Reply, S3Request
from tplr.testing.s3server.sigv4 import check_claim, read_claim
from tplr.testing.s3server.storage import Storage
from tplr.testing.s3server.xmltext import error_document

# Query parameters that select an operation, and one without effect that some clients add.
SELECTORS = ("list-type", "uploads", "delete", "uploadId")
IGNORED_PARAMETERS = frozenset({"x-id"})
# Every other x-amz- header requests an unsupported feature: ACLs, tags, locks, encryption, copies.
UNDERSTOOD_HEADERS = frozenset({
    "x-amz-date", "x-amz-security-token", "x-amz-content-sha256", "x-amz-user-agent", "x-amz-api-version",
    "x-amz-checksum-mode",
})  # fmt: skip
CONDITIONS = frozenset({"if-match", "if-none-match", "if-modified-since", "if-unmodified-since"})

log = logging.getLogger(__name__)


class S3App:
    """Serves requests against one storage.

    Args:
        clock: unix seconds; used to check signatures and to date replies.
    """

    def __init__(
        self,
        storage: Storage,
        keys: KeyTable,
        faults: Faults,
        clock: Callable[[], float],
        requests: TextIO | None = None,
    ) -> None:
        """``requests``: file that gets a line of JSON for each answered request."""
        self._requests = requests
        self._storage = storage
        self._keys = keys
        self._faults = faults
        self._clock = clock

    async def handle(self, request: web.Request) -> web.StreamResponse:
        began = self._clock()
        response = await self._handle(request)
        if self._requests:
            sent = response.content_length or 0 if request.method == "GET" else 0
            line = {"time": round(began, 3), "seconds": round(self._clock() - began, 4), "method": request.method}
            line |= {"path": request.raw_path, "status": response.status, "bytes": sent}
            self._requests.write(json.dumps(line) + "\n")
        return response

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        action = self._faults.take(request.method, request.raw_path)
        match action:
            case Status(status, code):
                body = error_document(code, "Injected fault.", request.raw_path)
                reply = Reply(status, {"Content-Type": "application/xml"}, body)
                return await _send(request, reply, None, self._clock())
            case Reset():
                break_connection(request, reset=True)
                return web.Response()
            case Delay(seconds):
                await asyncio.sleep(seconds)
            case _:
                pass
        with await self._answer(request, action) as reply:
            if isinstance(action, LoseResponse):
                break_connection(request, reset=True)
                return web.Response()
            return await _send(request, reply, action, self._clock())

    async def _answer(self, request: web.Request, action: Action | None) -> Reply:
        """Return the reply; refusals and failures of this server are also replies."""
        try:
            s3 = S3Request.of(request)
            if isinstance(action, FlipSentBit):
                s3 = replace(s3, content=DamagedContent(s3.content, action))
            elif isinstance(action, IgnoreDigests):
                s3 = replace(s3, digests_count=False)
            key = self._identify(s3)
            if isinstance(action, Instead):  # the signature is for the requested key
                s3 = replace(s3, key=s3.key + action.suffix)
            operation = _choose(s3)
            await self._check_right(key, s3, operation)
            _check_understood(s3, operation)
            return await operation.serve(self._storage, s3)
        except S3Error as error:
            return Reply.error(error, request.raw_path)
        except OSError as error:
            # Most likely a full disk: the log tells the operator.
            log.error("%s %s: %s", request.method, request.path, error)
            return Reply.error(
                S3Error("InternalError", f"Storage failed: {error.strerror or error}."), request.raw_path
            )
        except Exception:  # a bug becomes a 500 and a traceback in the log
            log.exception("%s %s", request.method, request.path)
            return Reply.error(S3Error("InternalError", "A bug in this server; its log says more."), request.raw_path)

    def _identify(self, request: S3Request) -> AccessKey:
        """Return the key that signed the request. Raises Unauthorized, SignatureDoesNotMatch, RequestTimeTooSkewed."""
        if request.bucket in self._storage.rules.public_buckets and "Authorization" not in request.headers:
            return AccessKey("", {request.bucket: GRANTS["read"]})
        claim = read_claim(request)
        key = self._keys.find(claim.access_key_id)
        if key is None:
            raise S3Error("Unauthorized", "The access key is unknown.")
        if request.headers.get("x-amz-security-token", "") != key.session_token:
            raise S3Error("Unauthorized", "The session token is not that of the access key.")
        check_claim(claim, request, key.secret, now=self._clock(), max_skew=self._storage.rules.max_clock_skew)
        return key

    async def _check_right(self, key: AccessKey, request: S3Request, operation: Operation) -> None:
        if not self._storage.objects.has_bucket(request.bucket):
            if request.bucket not in self._keys.buckets():
                raise S3Error("NoSuchBucket", f"There is no bucket {request.bucket[:80]!r}.")
            await asyncio.to_thread(self._storage.objects.create_bucket, request.bucket)
        if not key.may(operation.right, request.bucket):
            raise S3Error("AccessDenied", f"The key may not {operation.right} in {request.bucket}.")


def _choose(request: S3Request) -> Operation:
    level = "object" if request.key else "bucket"
    selector = next((name for name in SELECTORS if name in request.query), "")
    operation = OPERATIONS.get((request.method, level, selector))
    about_buckets = level == "bucket" and request.method in ("PUT", "DELETE")
    if not request.bucket or (operation is None and about_buckets):
        raise S3Error("AccessDenied", "Listing, creating and removing buckets needs an account's key, not a bucket's.")
    if operation is None:
        raise S3Error(
            "NotImplemented", f"{request.method} of this {level} is not implemented with {sorted(request.query)}"
        )
    if unknown := set(request.query) - operation.parameters - IGNORED_PARAMETERS - {selector}:
        raise S3Error("NotImplemented", f"Query parameters not implemented: {', '.join(sorted(unknown))}.")
    return operation


def _check_understood(request: S3Request, operation: Operation) -> None:
    """Refuse unsupported headers and parameters: if they were ignored, the caller would assume an effect."""
    if (
        request.headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
        or "aws-chunked" in request.headers.get("Content-Encoding", "")
    ):  # fmt: skip
        # R2's answer (August 2026) to the trailing checksums that AWS SDKs send over https by default.
        raise S3Error(
            "Unauthorized", "R2 takes no aws-chunked body: set request_checksum_calculation to when_required."
        )
    understood = UNDERSTOOD_HEADERS | operation.headers | (CONDITIONS if operation.conditional else set())
    for name in sorted(name.lower() for name in request.headers):
        asks = name.startswith(("x-amz-", "if-")) and not name.startswith("x-amz-meta-")
        if asks and name not in understood:
            raise S3Error("NotImplemented", f"Header {name!r} is not implemented for this operation.")


async def _send(request: web.Request, reply: Reply, action: Action | None, now: float) -> web.StreamResponse:
    headers = {"Date": formatdate(now, usegmt=True), **reply.headers}
    response = web.StreamResponse(status=reply.status, headers=headers)
    has_body = reply.status not in (204, 304)
    if has_body:
        response.content_length = reply.length()
    try:
        await response.prepare(request)
        if isinstance(reply.body, FileSlice) and action is None and request.method != "HEAD":
            await _send_file(request, reply.body)
        elif has_body and request.method != "HEAD":
            async for block in damage(reply.blocks(), action):
                await response.write(block)
    except ConnectionCut as cut:
        break_connection(request, reset=cut.reset)
    except ConnectionError:
        pass  # the client closed the connection
    return response


async def _send_file(request: web.Request, part: FileSlice) -> None:
    """Send the file with sendfile(2), which copies nothing into this process."""
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError
    if part.length:
        await asyncio.get_running_loop().sendfile(transport, part.file, part.start, part.length)

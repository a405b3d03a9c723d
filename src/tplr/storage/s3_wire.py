"""A signed request for or with an object, and what its raw answer says, in the words of botocore's answers."""

import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlencode

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tplr.errors import StoreError, StoreUnavailable
from tplr.schemas import Bucket
from tplr.storage.base import Sink
from tplr.storage.s3_body import Body
from tplr.storage.s3_errors import refusal
from tplr.storage.s3_exchange import Answer, HttpRequest, Server

_MAX_ERROR_BYTES = 2**16
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
_LENGTH = re.compile(r"[0-9]{1,15}")
_META = "x-amz-meta-"


class _Signer(S3SigV4Auth):
    """Signs with a digest of the body that is known already, or with none: nothing is hashed before it is sent."""

    def __init__(self, credentials: Credentials, region: str, sha256: str | None) -> None:
        super().__init__(credentials, "s3", region)
        self._payload = sha256 or "UNSIGNED-PAYLOAD"

    def payload(self, request: AWSRequest) -> str:
        return self._payload


@dataclass(frozen=True)
class Wire:
    """How requests of one credential get to one server, and by whose threads."""

    server: Server
    bucket: Bucket
    region: str
    threads: Executor

    def request(
        self,
        method: str,
        key: str,
        headers: Mapping[str, str],
        judge: Callable[[Answer], tuple[int, Sink | memoryview]],
        *,
        query: Mapping[str, str] | None = None,
        body: Body | None = None,
        sha256: str | None = None,
    ) -> HttpRequest:
        """A request for or with an object, to be run.

        Args:
            sha256: of the body, 64 hex digits: a store refuses another one. Without it, MD5 has to guard the body.
        """
        credentials = Credentials(self.bucket.access_key_id, self.bucket.secret_access_key)
        path = f"/{self.bucket.name}/{quote(key, safe='/-._~')}"
        if query:
            path += f"?{urlencode(query, quote_via=quote)}"
        length = {} if body is None else {"Content-Length": str(body.size)}
        request = AWSRequest(method, self.server.endpoint + path, headers={**headers, **length})
        _Signer(credentials, self.region, sha256).add_auth(request)
        return HttpRequest(self.server, method, path, dict(request.headers.items()), judge=judge, body=body)


def facts_of(answer: Answer) -> dict[str, Any]:
    """What botocore says of an object. Raises ValueError, TypeError for a date that is none."""
    headers = _headers(answer)
    modified = parsedate_to_datetime(headers["last-modified"]) if "last-modified" in headers else None
    length = headers.get("content-length", "")
    return {
        "ContentLength": int(length) if _LENGTH.fullmatch(length) else None,
        "ContentRange": headers.get("content-range"),
        "ETag": headers.get("etag", ""),
        "LastModified": modified and (modified if modified.tzinfo else modified.replace(tzinfo=UTC)),
        "Metadata": {name.removeprefix(_META): text for name, text in headers.items() if name.startswith(_META)},
        "ResponseMetadata": {"HTTPStatusCode": answer.status, "HTTPHeaders": headers},
    }


def refusal_of(answer: Answer, bucket: str, key: str) -> StoreError:
    """Our error for an answer that is none of 200 and 206."""
    body = answer.read(_MAX_ERROR_BYTES)
    if len(body) == _MAX_ERROR_BYTES:
        return StoreUnavailable(f"an error of more than {_MAX_ERROR_BYTES} bytes", bucket=bucket, key=key)
    code = _CODE.search(body)
    meta = {"HTTPStatusCode": answer.status, "HTTPHeaders": _headers(answer)}
    return refusal({"ResponseMetadata": meta, "Error": {"Code": code[1].decode() if code else ""}}, bucket, key)


def _headers(answer: Answer) -> dict[str, str]:
    """By lower-case names; what comes twice is no value that anybody could read."""
    return {name.lower(): answer.getheader(name, "") for name in answer.headers}

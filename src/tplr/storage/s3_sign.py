"""AWS Signature Version 4 for S3, in the ``Authorization`` header.

Steps and names follow AWS's "Create a signed AWS API request". S3 encodes the path only once, and the signature may
exclude the body.
"""

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote

from tplr.schemas import Bucket

UNSIGNED = "UNSIGNED-PAYLOAD"


def encode_target(bucket: str, key: str, query: Mapping[str, str]) -> str:
    """Return path and query of a path-style request, percent-encoded and in signing order."""
    path = f"/{bucket}/{quote(key, safe='/-._~')}" if key else f"/{bucket}"
    encoded = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query.items()))
    return f"{path}?{encoded}" if encoded else path


def sign(
    bucket: Bucket,
    *,
    region: str,
    method: str,
    host: str,
    target: str,
    headers: Mapping[str, str],
    sha256: str | None = None,
    now: datetime | None = None,
) -> dict[str, str]:
    """Return the headers of a request, signed with the bucket's key if it has one.

    Args:
        host: ``host[:port]`` of the endpoint.
        target: result of ``encode_target``.
        sha256: the body's, 64 hex digits; the store refuses a body that does not match. None excludes the body from
            the signature.
    """
    if not bucket.access_key_id:
        return {**headers, "host": host}
    time = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{time[:8]}/{region}/s3/aws4_request"
    payload = sha256 or UNSIGNED
    signed = {name.lower(): value for name, value in headers.items()}
    signed |= {"host": host, "x-amz-content-sha256": payload, "x-amz-date": time}
    if bucket.session_token:
        signed["x-amz-security-token"] = bucket.session_token
    names = sorted(signed)
    path, _, query = target.partition("?")
    lines = [f"{name}:{' '.join(signed[name].split())}\n" for name in names]
    canonical = "\n".join([method, path, query, "".join(lines), ";".join(names), payload])
    text = "\n".join(["AWS4-HMAC-SHA256", time, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{bucket.secret_access_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    credential = f"Credential={bucket.access_key_id}/{scope}, SignedHeaders={';'.join(names)}"
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return signed | {"authorization": f"AWS4-HMAC-SHA256 {credential}, Signature={signature}"}

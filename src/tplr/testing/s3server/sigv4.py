"""AWS Signature Version 4 in the Authorization header: parses it, and verifies it against the request.

Steps and names as in AWS's "Create a signed AWS API request", with S3's two exceptions: the path is encoded once
and not normalised, and the body may be left out of the signature (``UNSIGNED-PAYLOAD``).
"""

import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.request import S3Request

# R2's location hints, and its aliases of "auto".
REGIONS = frozenset({"auto", "", "us-east-1", "wnam", "enam", "weur", "eeur", "apac", "oc"})
UNSIGNED = "UNSIGNED-PAYLOAD"
AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key_id>[^/,\s]+)/(?P<day>\d{8})/(?P<region>[^/,\s]*)/s3/aws4_request,"
    r"\s*SignedHeaders=(?P<headers>[a-z0-9;_.-]+),\s*Signature=(?P<signature>[0-9a-f]{64})"
)


@dataclass(frozen=True)
class Claim:
    """The Authorization header, parsed and not verified.

    Attributes:
        signed_at: the text of ``x-amz-date``, ``YYYYMMDDTHHMMSSZ``; its day is that of the credential's scope.
        payload: ``x-amz-content-sha256``: 64 hex digits, ``UNSIGNED-PAYLOAD`` or a ``STREAMING-`` scheme.
    """

    access_key_id: str
    signed_at: str
    region: str
    signed_headers: tuple[str, ...]
    signature: str
    payload: str

    @property
    def scope(self) -> str:
        return f"{self.signed_at[:8]}/{self.region}/s3/aws4_request"


def read_claim(request: S3Request) -> Claim:
    """Parses the header. Raises Unauthorized without a signature, AuthorizationHeaderMalformed if it is invalid."""
    header = request.headers.get("Authorization")
    if header is None:
        raise S3Error("Unauthorized", "The request has no Authorization header; presigned URLs are not implemented.")
    match = AUTHORIZATION.fullmatch(header)
    signed_at = request.headers.get("x-amz-date", "")
    payload = request.headers.get("x-amz-content-sha256", "")
    if match is None:
        raise S3Error("AuthorizationHeaderMalformed", "Expected AWS4-HMAC-SHA256 with a credential for s3.")
    if not re.fullmatch(r"\d{8}T\d{6}Z", signed_at) or signed_at[:8] != match["day"]:
        raise S3Error("AuthorizationHeaderMalformed", "x-amz-date is missing, or not of the credential's day.")
    if not re.fullmatch(rf"[0-9a-f]{{64}}|{UNSIGNED}|STREAMING-[A-Z0-9-]+", payload):
        raise S3Error("InvalidArgument", "x-amz-content-sha256: expected 64 hex digits or UNSIGNED-PAYLOAD.")
    return Claim(
        match["key_id"], signed_at, match["region"], tuple(match["headers"].split(";")), match["signature"], payload
    )


def check_claim(claim: Claim, request: S3Request, secret: str, *, now: float, max_skew: float) -> None:
    """Verifies the claim; raises RequestTimeTooSkewed, InvalidRegionName, AccessDenied or SignatureDoesNotMatch.

    Args:
        secret: of the key that the claim names.
        now: the server's clock, unix seconds.
        max_skew: seconds by which the client's clock may differ, in either direction.
    """
    try:
        signed_at = datetime.strptime(claim.signed_at, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise S3Error("AuthorizationHeaderMalformed", f"x-amz-date: {claim.signed_at} is not a time.") from error
    if abs(now - signed_at) > max_skew:
        raise S3Error(
            "RequestTimeTooSkewed",
            f"The request was signed {signed_at - now:+.0f} s off the server's time; {max_skew:.0f} s are allowed.",
        )
    if claim.region not in REGIONS:
        raise S3Error("InvalidRegionName", f"Region {claim.region[:40]!r}; expected one of {sorted(REGIONS)}.")
    must_be_signed = {"host"} | {name.lower() for name in request.headers if name.lower().startswith("x-amz-")}
    if missing := must_be_signed - set(claim.signed_headers):
        raise S3Error("AccessDenied", f"These headers are not signed: {', '.join(sorted(missing))}.")
    if not hmac.compare_digest(sign(claim, request, secret), claim.signature):
        raise S3Error("SignatureDoesNotMatch", "The signature is not the one this request and this secret give.")


def sign(claim: Claim, request: S3Request, secret: str) -> str:
    """The signature that the request should carry: 64 hex digits."""
    canonical = hashlib.sha256(_canonical(claim, request).encode("utf-8", "surrogateescape")).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", claim.signed_at, claim.scope, canonical])
    key = f"AWS4{secret}".encode()
    for part in claim.scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


def _canonical(claim: Claim, request: S3Request) -> str:
    pairs = sorted((_encode(name), _encode(value)) for name, value in request.query.items())
    # A header that is signed but absent counts as empty, and will not match.
    headers = [f"{name}:{' '.join(request.headers.get(name, '').split())}\n" for name in claim.signed_headers]
    return "\n".join([
        request.method,
        quote(request.path, safe="/-_.~"),
        "&".join(f"{name}={value}" for name, value in pairs),
        "".join(headers),
        ";".join(claim.signed_headers),
        claim.payload,
    ])  # fmt: skip


def _encode(text: str) -> str:
    return quote(text, safe="-_.~")

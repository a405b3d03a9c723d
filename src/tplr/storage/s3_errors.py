"""Translates errors of S3 servers and of HTTP to this project's errors, by one table."""

import contextlib
import errno
import re
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime

from tplr.errors import (
    AccessDenied,
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    StoreError,
    StoreUnavailable,
    UploadDamaged,
)
from tplr.storage.s3_http import DeadlineExceeded, HTTPException

# The code decides first: 400 and 403 are also used for transient failures. The status decides if the code is not listed
# or missing, as after a HEAD. Sources: the error code pages of Cloudflare and of S3.
_BY_CODE: Mapping[str, tuple[type[StoreError], str]] = {
    "RequestTimeTooSkewed": (StoreUnavailable, "this machine's clock differs from the store's: set it by NTP"),
    "RequestTimeout": (StoreUnavailable, "the store timed out waiting for the request"),
    "IncompleteBody": (StoreUnavailable, "the body arrived incomplete"),
    "BadDigest": (UploadDamaged, "the body arrived damaged"),
    "XAmzContentSHA256Mismatch": (UploadDamaged, "the body arrived damaged"),
    "SlowDown": (StoreUnavailable, "throttled"),
    "InternalError": (StoreUnavailable, "the store failed"),
    "ConditionalRequestConflict": (StoreUnavailable, "another write was under way"),
    "EntityTooLarge": (ObjectTooLarge, "larger than the store accepts"),
    "NoSuchBucket": (ObjectNotFound, "no such bucket"),
    "NoSuchUpload": (ObjectNotFound, "no such upload: completed, aborted or expired"),
    "InvalidRange": (PreconditionFailed, "the object ends before the range does"),
}
_BY_STATUS: Mapping[int, tuple[type[StoreError], str]] = {
    401: (AccessDenied, "unknown access key"),
    403: (AccessDenied, "access denied"),
    404: (ObjectNotFound, "no such object"),
    408: (StoreUnavailable, "the store timed out waiting for the request"),
    412: (PreconditionFailed, "the object changed, or exists and must not be overwritten"),
    413: (ObjectTooLarge, "larger than the store accepts"),
    416: (PreconditionFailed, "the object ends before the range does"),
    425: (StoreUnavailable, "too early"),
    429: (StoreUnavailable, "throttled"),
    501: (StoreError, "the store does not support this request"),
}
_OTHER = (StoreError, "refused")
_SERVER_FAULT = (StoreUnavailable, "the store failed")

# Raised for dates and numbers that can't be parsed.
UNREADABLE = (ValueError, TypeError, OverflowError)
_CONNECTION_ERRORS = (HTTPException, OSError, *UNREADABLE)

# R2 allows one write per second to a key, and answers further writes with 429 without Retry-After.
_THROTTLED_SECONDS = 1.0
# Servers refuse signatures whose time is off by 15 minutes. The limit is lower, because the Date header has whole
# seconds and is set later.
_SKEW_SECONDS = 14 * 60.0
_CODE = re.compile(r"[A-Za-z0-9.]{1,64}")
_REGION = re.compile(r"[a-z0-9-]{1,32}")
_SECONDS = re.compile(r"[0-9]{1,6}")


@contextlib.contextmanager
def translate_errors(bucket: str, key: str) -> Iterator[None]:
    """Raise errors of HTTP, of the socket and of header parsing in the block as store errors."""
    try:
        yield
    except _CONNECTION_ERRORS as error:
        raise _failure(error, bucket, key) from error


def refusal(status: int, code: str, headers: Mapping[str, str], bucket: str, key: str) -> StoreError:
    """Return the error for an S3 error response.

    The server's message is omitted: it may be untrusted text, or quote the request's credentials.

    Args:
        code: S3's error code, "" if the response has none.
        headers: by lower-case names.
    """
    if status == 403 and not code and _is_skewed(headers):
        code = "RequestTimeTooSkewed"  # the response to a HEAD has no body with this code
    region = headers.get("x-amz-bucket-region", "")
    if status in (301, 307, 400) and _REGION.fullmatch(region):
        return StoreError(f"the bucket is in the region {region}: set AWS_REGION={region}", bucket=bucket, key=key)
    by_status = _BY_STATUS.get(status, _SERVER_FAULT if status >= 500 else _OTHER)
    kind, words = _BY_CODE.get(code, by_status)
    message = f"{words} ({status}{f' {code}' if _CODE.fullmatch(code) else ''})"
    if not issubclass(kind, StoreUnavailable):
        return kind(message, bucket=bucket, key=key)
    given = headers.get("retry-after", "")
    retry_after = float(given) if _SECONDS.fullmatch(given) else _THROTTLED_SECONDS if status == 429 else None
    return kind(message, bucket=bucket, key=key, retry_after=retry_after)


def _failure(error: Exception, bucket: str, key: str) -> StoreError:
    """Return the error for one of ``_CONNECTION_ERRORS``."""
    if type(error) is HTTPException:
        # http.client raises exactly this class only for more than 100 headers. R2 stores thousands of metadata fields,
        # so the object's owner is at fault, not the network.
        return StoreError("the object has too many metadata fields", bucket=bucket, key=key)
    if isinstance(error, DeadlineExceeded):
        words = "timed out: no response, or a transfer that is too slow"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        words = "disk full: free some space"
    elif isinstance(error, TimeoutError):
        words = "no data on the connection"
    elif isinstance(error, UNREADABLE):
        words = f"a response that can't be parsed ({type(error).__name__})"
    else:
        words = f"the connection failed ({type(error).__name__})"
    return StoreUnavailable(words, bucket=bucket, key=key)


def _is_skewed(headers: Mapping[str, str]) -> bool:
    """Return whether the store's clock is so far from this machine's that it refuses signatures."""
    try:
        there = parsedate_to_datetime(headers.get("date", "")).timestamp()
    except UNREADABLE:
        return False
    return abs(there - time.time()) > _SKEW_SECONDS

"""What S3 servers, botocore and aiohttp say becomes ours, by one table."""

import errno
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any

import aiohttp
from botocore.exceptions import BotoCoreError, HTTPClientError

from tplr.errors import (
    AccessDenied,
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    StoreError,
    StoreUnavailable,
    UploadDamaged,
)

# The code speaks first: 400 and 403 also carry passing troubles. A HEAD has no body and gives "404" for a code, so
# the status decides where the code is not listed. Codes: facts from Cloudflare's error-codes page and S3's.
_BY_CODE: Mapping[str, tuple[type[StoreError], str]] = {
    "RequestTimeTooSkewed": (StoreUnavailable, "this machine's clock differs from the store's: set it by NTP"),
    "RequestTimeout": (StoreUnavailable, "the store waited too long for the request"),
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
    401: (AccessDenied, "the store does not know this key"),
    403: (AccessDenied, "this key may not do that here"),
    404: (ObjectNotFound, "no such object"),
    408: (StoreUnavailable, "the store waited too long for the request"),
    412: (PreconditionFailed, "the object changed, or exists and must not be overwritten"),
    413: (ObjectTooLarge, "larger than the store accepts"),
    416: (PreconditionFailed, "the object ends before the range does"),
    425: (StoreUnavailable, "too early"),
    429: (StoreUnavailable, "throttled"),
    501: (StoreError, "the store does not support this request"),
}
_OTHER = (StoreError, "refused")
_SERVER_FAULT = (StoreUnavailable, "the store failed")

# Raised, raw, for dates and numbers that can't be read.
_UNREADABLE = (ValueError, OverflowError, RuntimeError)
CONNECTION_ERRORS = (BotoCoreError, HTTPClientError, aiohttp.ClientError, HTTPException, OSError, *_UNREADABLE)

# R2 allows one write a second to a key and says so with a bare 429.
_THROTTLED_SECONDS = 1.0
# Signatures are refused at fifteen minutes; the header that tells has whole seconds, and comes later.
_SKEW_SECONDS = 14 * 60.0
_CODE = re.compile(r"[A-Za-z0-9.]{1,64}")
_SECONDS = re.compile(r"[0-9]{1,6}")


def refusal(response: Mapping[str, Any], bucket: str, key: str) -> StoreError:
    """Our error for an S3 error answer.

    The server's message stays out of ours: it may be a stranger's text, or quote the request's credentials.

    Args:
        response: as in ``botocore.exceptions.ClientError.response``.
    """
    meta = response.get("ResponseMetadata", {})
    status = int(meta.get("HTTPStatusCode", 0))
    code = str(response.get("Error", {}).get("Code", ""))
    if status == 403 and code in ("", "403") and _is_skewed(meta.get("HTTPHeaders", {})):
        code = "RequestTimeTooSkewed"  # what a HEAD would have said, if it had a body
    by_status = _BY_STATUS.get(status, _SERVER_FAULT if status >= 500 else _OTHER)
    kind, words = _BY_CODE.get(code, by_status)
    message = f"{words} ({status}{f' {code}' if _CODE.fullmatch(code) and code != str(status) else ''})"
    if not issubclass(kind, StoreUnavailable):
        return kind(message, bucket=bucket, key=key)
    given = str(meta.get("HTTPHeaders", {}).get("retry-after", ""))
    retry_after = float(given) if _SECONDS.fullmatch(given) else _THROTTLED_SECONDS if status == 429 else None
    return kind(message, bucket=bucket, key=key, retry_after=retry_after)


def failure(error: Exception, bucket: str, key: str, *, expired: bool) -> StoreError:
    """Our error for one of ``CONNECTION_ERRORS``; ``expired`` if it was our own deadline."""
    if type(error) is HTTPException:
        # So http.client says that there are more than 100 headers, and nothing else. R2 takes thousands of user
        # metadata: whoever gave them to its object is not to be excused as one whom the network failed.
        return StoreError("the object has more metadata than anybody reads", bucket=bucket, key=key)
    if expired:
        words = "gave up: no answer in time, or bytes that came too slowly"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        words = "disk full: free some space"
    elif isinstance(error, TimeoutError):
        words = "the connection fell silent"
    elif isinstance(error, _UNREADABLE):
        words = f"an answer that can't be read ({type(error).__name__})"
    else:
        words = f"the connection failed ({type(error).__name__})"
    return StoreUnavailable(words, bucket=bucket, key=key)


def _is_skewed(headers: Mapping[str, str]) -> bool:
    """Whether the store's clock refuses what this machine's signs."""
    try:
        there = parsedate_to_datetime(headers.get("date", "")).timestamp()
    except (ValueError, OverflowError):
        return False
    return abs(there - time.time()) > _SKEW_SECONDS

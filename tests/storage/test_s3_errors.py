"""The table that maps responses and exceptions to this package's errors."""

import errno
from http.client import HTTPException, IncompleteRead

import pytest

from tplr.errors import (
    AccessDenied,
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    StoreError,
    StoreUnavailable,
    UploadDamaged,
)
from tplr.storage.s3_errors import refusal, translate_errors
from tplr.storage.s3_http import DeadlineExceeded


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "Unauthorized", AccessDenied),
        (403, "AccessDenied", AccessDenied),
        (403, "SignatureDoesNotMatch", AccessDenied),
        (403, "", AccessDenied),
        (403, "RequestTimeTooSkewed", StoreUnavailable),
        (404, "", ObjectNotFound),
        (404, "NoSuchKey", ObjectNotFound),
        (404, "NoSuchBucket", ObjectNotFound),
        (409, "ConditionalRequestConflict", StoreUnavailable),
        (412, "PreconditionFailed", PreconditionFailed),
        (416, "InvalidRange", PreconditionFailed),
        (400, "EntityTooLarge", ObjectTooLarge),
        (413, "", ObjectTooLarge),
        (400, "RequestTimeout", StoreUnavailable),
        (400, "IncompleteBody", StoreUnavailable),
        (400, "BadDigest", UploadDamaged),
        (400, "XAmzContentSHA256Mismatch", UploadDamaged),
        (429, "TooManyRequests", StoreUnavailable),
        (429, "", StoreUnavailable),
        (500, "InternalError", StoreUnavailable),
        (503, "SlowDown", StoreUnavailable),
        (522, "", StoreUnavailable),
        (200, "InternalError", StoreUnavailable),
        (301, "PermanentRedirect", StoreError),
        (400, "InvalidArgument", StoreError),
        (501, "NotImplemented", StoreError),
    ],
)
def test_status_and_code_decide(status: int, code: str, kind: type[StoreError]) -> None:
    error = refusal(status, code, {}, "bucket", "key")
    assert type(error) is kind
    assert (error.bucket, error.key) == ("bucket", "key")
    assert str(status) in str(error)


def test_a_strange_code_is_not_repeated() -> None:
    assert "\n" not in str(refusal(400, "Evil\nCode", {}, "b", "k"))
    assert len(str(refusal(400, "E" * 5000, {}, "b", "k"))) < 200


@pytest.mark.parametrize(
    ("status", "header", "expected"),
    [(503, "7", 7.0), (429, "3", 3.0), (429, "", 1.0), (503, "", None), (503, "soon", None), (503, "9" * 400, None)],
)
def test_retry_after(status: int, header: str, expected: float | None) -> None:
    error = refusal(status, "x", {"retry-after": header}, "b", "k")
    assert isinstance(error, StoreUnavailable)
    assert error.retry_after == expected


@pytest.mark.parametrize(
    ("foreign", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk full"),
        (ConnectionResetError(), "connection failed"),
        (IncompleteRead(b""), "connection failed"),
        (TimeoutError(), "no data on"),
        (DeadlineExceeded(), "timed out"),
        (ValueError("Invalid timestamp"), "can't be parsed"),
    ],
)
def test_foreign_errors_are_translated(foreign: Exception, words: str) -> None:
    with pytest.raises(StoreUnavailable, match=words) as caught, translate_errors("bucket", "key"):
        raise foreign
    assert caught.value.__cause__ is foreign


def test_too_many_headers_are_the_owner_s_fault() -> None:
    with pytest.raises(StoreError, match="metadata") as caught, translate_errors("bucket", "key"):
        raise HTTPException("got more than 100 headers")
    assert not isinstance(caught.value, StoreUnavailable)


def test_our_errors_pass_unchanged() -> None:
    ours = ObjectNotFound("gone")
    with pytest.raises(ObjectNotFound) as caught, translate_errors("bucket", "key"):
        raise ours
    assert caught.value is ours

"""The table by which a server's answers become our errors."""

from typing import Any

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
from tplr.storage.s3_errors import refusal


def answer(status: int, code: str, **headers: str) -> dict[str, Any]:
    return {
        "Error": {"Code": code, "Message": "a stranger's words"},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
    }


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "Unauthorized", AccessDenied),
        (403, "AccessDenied", AccessDenied),
        (403, "SignatureDoesNotMatch", AccessDenied),
        (403, "403", AccessDenied),
        (403, "RequestTimeTooSkewed", StoreUnavailable),
        (404, "404", ObjectNotFound),
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
        (429, "429", StoreUnavailable),
        (500, "InternalError", StoreUnavailable),
        (503, "SlowDown", StoreUnavailable),
        (522, "522", StoreUnavailable),
        (200, "InternalError", StoreUnavailable),
        (301, "PermanentRedirect", StoreError),
        (400, "InvalidArgument", StoreError),
        (501, "NotImplemented", StoreError),
    ],
)
def test_status_and_code_decide(status: int, code: str, kind: type[StoreError]) -> None:
    error = refusal(answer(status, code), "bucket", "key")
    assert type(error) is kind
    assert (error.bucket, error.key) == ("bucket", "key")
    assert str(status) in str(error)
    assert "stranger" not in str(error)


def test_a_strange_code_is_not_repeated() -> None:
    assert "\n" not in str(refusal(answer(400, "Evil\nCode"), "b", "k"))
    assert len(str(refusal(answer(400, "E" * 5000), "b", "k"))) < 200


@pytest.mark.parametrize(
    ("status", "header", "expected"),
    [(503, "7", 7.0), (429, "3", 3.0), (429, "", 1.0), (503, "", None), (503, "soon", None), (503, "9" * 400, None)],
)
def test_retry_after(status: int, header: str, expected: float | None) -> None:
    error = refusal(answer(status, "x", **{"retry-after": header}), "b", "k")
    assert isinstance(error, StoreUnavailable)
    assert error.retry_after == expected

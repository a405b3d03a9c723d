"""Signatures equal botocore's exactly."""

from datetime import UTC, datetime

import pytest
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tplr.schemas import Bucket
from tplr.storage.s3_sign import encode_target, sign

BUCKET = Bucket(name="bucket", account_id="a" * 32, access_key_id="0" * 32, secret_access_key="1" * 64)
NOW = datetime(2026, 11, 22, 15, 4, 45, tzinfo=UTC)


class Signer(auth.S3SigV4Auth):
    sha256: str | None = None

    def payload(self, request: AWSRequest) -> str:
        return self.sha256 or "UNSIGNED-PAYLOAD"


@pytest.mark.parametrize("sha256", [None, "ab" * 32], ids=["unsigned", "signed"])
@pytest.mark.parametrize(
    ("method", "key", "query", "headers"),
    [
        ("GET", "k", {}, {"Range": "bytes=0-9", "If-Match": '"e"'}),
        ("PUT", "a key/with~odd+chars=&\u00e9", {}, {"Content-MD5": "x==", "x-amz-meta-note": "two  words"}),
        ("PUT", "k", {"partNumber": "3", "uploadId": "a/b+c="}, {"Content-Length": "5"}),
        ("POST", "k", {"uploads": ""}, {}),
        ("GET", "", {"list-type": "2", "prefix": "a/ b", "start-after": "", "max-keys": "7"}, {}),
    ],
)
def test_signature(
    monkeypatch: pytest.MonkeyPatch, method: str, key: str, query: dict, headers: dict, sha256: str | None
) -> None:
    target = encode_target("bucket", key, query)
    signed = sign(
        BUCKET,
        region="auto",
        method=method,
        host="127.0.0.1:9000",
        target=target,
        headers=headers,
        sha256=sha256,
        now=NOW,
    )
    monkeypatch.setattr(auth, "get_current_datetime", lambda remove_tzinfo=True: NOW.replace(tzinfo=None))
    request = AWSRequest(method, "http://127.0.0.1:9000" + target, headers=headers)
    signer = Signer(Credentials(BUCKET.access_key_id, BUCKET.secret_access_key), "s3", "auto")
    signer.sha256 = sha256
    signer.add_auth(request)
    assert signed["authorization"] == request.headers["Authorization"]

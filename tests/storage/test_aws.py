"""Buckets of S3 and compatible stores: which credentials are found, where, and when they are renewed."""

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tplr.errors import AccessDenied, ConfigError
from tplr.storage import S3Connections
from tplr.storage.aws import aws_location
from tplr.storage.s3_errors import refusal
from tplr.testing.s3server import Rules, serve

KEY, SECRET = "a" * 32, "c" * 64
STATIC = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "eu-west-1"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with an empty ``.aws``; no instance is asked."""
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", *STATIC):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path


def test_variables_come_first(home: Path) -> None:
    (home / ".aws/config").write_text("[default]\naws_access_key_id = other\naws_secret_access_key = other\n")
    found = aws_location("elsewhere", STATIC)
    assert (found.bucket.access_key_id, found.bucket.name, found.bucket.session_token) == ("AKIA", "elsewhere", "")
    assert (found.endpoint, found.region) == ("https://s3.eu-west-1.amazonaws.com", "eu-west-1")
    assert aws_location("x-y", STATIC | {"AWS_ENDPOINT_URL": "https://minio.example"}).endpoint == (
        "https://minio.example"
    )
    temporary = aws_location("elsewhere", STATIC | {"AWS_SESSION_TOKEN": "token"})
    assert temporary.bucket.session_token == "token"
    assert not {SECRET, "token"} & {*repr(temporary).split("'")}


def test_profiles_with_their_region_and_endpoint(home: Path) -> None:
    (home / ".aws/config").write_text(
        "[profile work]\nregion = eu-north-1\nservices = mine\n[services mine]\ns3 =\n"
        "  endpoint_url = http://127.0.0.1:9\n[default]\nregion = ap-south-1\n"
    )
    (home / ".aws/credentials").write_text(
        "[work]\naws_access_key_id = WORK\naws_secret_access_key = s\naws_session_token = t\n"
        "[default]\naws_access_key_id = HOME\naws_secret_access_key = s\n"
    )
    found = aws_location("bucket", {"AWS_PROFILE": "work"})
    assert (found.bucket.access_key_id, found.bucket.session_token, found.renew) == ("WORK", "t", None)
    assert (found.endpoint, found.region) == ("http://127.0.0.1:9", "eu-north-1")
    found = aws_location("bucket", {})
    assert (found.bucket.access_key_id, found.region) == ("HOME", "ap-south-1")
    assert found.endpoint == "https://s3.ap-south-1.amazonaws.com"


def test_what_can_not_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match=r"bucket 'b': .* The config profile \(gone\) could not be found"):
        aws_location("b", {"AWS_PROFILE": "gone"})
    with pytest.raises(ConfigError, match="only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set"):
        aws_location("b", {"AWS_ACCESS_KEY_ID": "x"})


async def test_credentials_that_expire_are_fetched_again(home: Path, tmp_path: Path) -> None:
    """A role's credentials from a program: new ones are requested when the previous ones have expired."""
    program = home / "credentials.py"
    answer = {"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": SECRET}
    program.write_text(
        f"import json, pathlib\ncalls = pathlib.Path({str(home / 'calls')!r})\n"
        "count = len(calls.read_text()) if calls.exists() else 0\ncalls.write_text('x' * (count + 1))\n"
        f"print(json.dumps({answer!r} | json.loads(pathlib.Path({str(home / 'now')!r}).read_text())))\n"
    )
    (home / ".aws/config").write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")

    def issue(token: str, minutes: int) -> None:
        expires = (datetime.now(UTC) + timedelta(minutes=minutes)).isoformat()
        (home / "now").write_text(json.dumps({"SessionToken": token, "Expiration": expires}))

    keys = {KEY: {"secret": SECRET, "session_token": "first", "buckets": {"corpus": "read-write"}}}
    async with serve(tmp_path / "s3", keys) as server:
        issue("first", minutes=1)  # botocore fetches new ones in the last minutes
        found = aws_location("corpus", {"AWS_ENDPOINT_URL": server.endpoint})
        async with S3Connections(found.endpoint, region=found.region) as connections:
            store = connections.store(found.bucket, found.renew)
            await store.put("k", b"x")
            keys[KEY]["session_token"] = "second"
            server.keys.replace(keys)
            issue("second", minutes=60)
            assert await store.get("k", max_bytes=9) == b"x"
            calls = (home / "calls").read_text()
            await store.get("k", max_bytes=9)
            assert (home / "calls").read_text() == calls  # still good
            with pytest.raises(AccessDenied):
                await connections.store(found.bucket).get("k", max_bytes=9)


async def test_public_buckets_need_no_credentials_and_others_say_so(tmp_path: Path) -> None:
    keys = {KEY: {"secret": SECRET, "buckets": {"open": "read-write", "closed": "read-write"}}}
    async with serve(tmp_path / "s3", keys, rules=Rules(public_buckets=frozenset({"open"}))) as server:
        owner = STATIC | {"AWS_ACCESS_KEY_ID": KEY, "AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1"}
        async with S3Connections(server.endpoint, region="us-east-1") as connections:
            await connections.store(aws_location("open", owner).bucket).put("a/k", b"x")
            public, closed = (
                connections.store(aws_location(name, {"AWS_ENDPOINT_URL": server.endpoint}).bucket)
                for name in ("open", "closed")
            )
            assert await public.get("a/k", max_bytes=9) == b"x"
            assert [info.key for info in await public.list("a/")] == ["a/k"]
            with pytest.raises(AccessDenied):
                await public.put("k", b"y")
            with pytest.raises(AccessDenied, match="no credentials were found, and it is not public"):
                await closed.get("k", max_bytes=9)


def test_a_bucket_of_another_region_is_told() -> None:
    error = refusal(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-3"}, "b", "k")
    assert "the bucket is in the region eu-west-3: set AWS_REGION=eu-west-3" in str(error)
    assert "refused (301" in str(refusal(301, "PermanentRedirect", {"x-amz-bucket-region": "<b>"}, "b", "k"))

"""Objects on disk: whole, also after a restart, a torn file or a full disk."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from tplr.errors import ConfigError
from tplr.testing.s3server import Server, serve
from tplr.testing.s3server.blobfile import Draft


async def test_objects_and_uploads_survive_a_restart(tmp_path: Path, keys: Any, rules: Any, connect: Any) -> None:
    target = {"Bucket": "gradients", "Key": "../b"}
    async with serve(tmp_path, keys, rules=rules, fsync=True) as server:
        s3 = await connect(server)
        await s3.put_object(Bucket="gradients", Key="a", Body=b"bytes", Metadata={"n": "1"})
        before = await s3.list_objects_v2(Bucket="gradients")
        upload_id = (await s3.create_multipart_upload(**target))["UploadId"]
        part = await s3.upload_part(**target, UploadId=upload_id, PartNumber=1, Body=b"part")
    (tmp_path / "drafts" / "left-by-a-killed-server").write_bytes(b"half")
    async with serve(tmp_path, keys, rules=rules) as server:
        s3 = await connect(server)
        after = await s3.list_objects_v2(Bucket="gradients")
        assert after["Contents"] == before["Contents"]
        got = await s3.get_object(Bucket="gradients", Key="a")
        assert (await got["Body"].read(), got["Metadata"]) == (b"bytes", {"n": "1"})
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        await s3.complete_multipart_upload(**target, UploadId=upload_id, MultipartUpload=parts)
        assert await (await s3.get_object(**target))["Body"].read() == b"part"
    assert list((tmp_path / "drafts").iterdir()) == []


async def test_a_torn_or_foreign_file_is_no_object(
    tmp_path: Path, keys: Any, rules: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(tmp_path, keys, rules=rules) as server:
        s3 = await connect(server)
        for key in ("a", "b"):
            await s3.put_object(Bucket="gradients", Key=key, Body=b"bytes" * 100)
    victim, _ = sorted((tmp_path / "buckets/gradients/objects").glob("*/*"))
    victim.write_bytes(victim.read_bytes()[100:])
    victim.with_name("foreign").write_bytes(b"x")
    async with serve(tmp_path, keys, rules=rules) as server:
        listed = await (await connect(server)).list_objects_v2(Bucket="gradients")
    assert listed["KeyCount"] == 1
    assert caplog.text.count("holds no object") == 2


async def test_one_server_has_a_folder(tmp_path: Path, keys: Any) -> None:
    async with serve(tmp_path, keys):
        with pytest.raises(ConfigError, match="another S3 server uses this folder"):
            async with serve(tmp_path, keys):
                pass
    async with serve(tmp_path, keys):
        pass


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft's file is /dev/full, which accepts no byte."""

    def __init__(self: Draft, folder: Path, *, fsync: bool) -> None:
        true_init(self, folder, fsync=fsync)
        self._file.close()
        self._file = Path("/dev/full").open("wb")  # noqa: SIM115 - the draft closes it

    true_init = Draft.__init__
    monkeypatch.setattr(Draft, "__init__", __init__)


@pytest.mark.parametrize("size", [10, 3 * 2**20])
async def test_a_full_disk_is_said_and_nothing_is_left(
    server: Server, s3: Any, tmp_path: Path, request: Any, refusal: Any, size: int
) -> None:
    await s3.put_object(Bucket="gradients", Key="a", Body=b"before")
    upload_id = (await s3.create_multipart_upload(Bucket="gradients", Key="m"))["UploadId"]
    request.getfixturevalue("full_disk")
    failed = (500, "InternalError")
    assert await refusal(s3.put_object(Bucket="gradients", Key="a", Body=bytes(size))) == failed
    part = s3.upload_part(Bucket="gradients", Key="m", UploadId=upload_id, PartNumber=1, Body=bytes(size))
    assert await refusal(part) == failed
    with pytest.raises(Exception, match="No space left on device") as caught:
        await s3.create_multipart_upload(Bucket="gradients", Key="n")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 500  # pyright: ignore
    assert list((tmp_path / "root/drafts").iterdir()) == []
    assert len(list((tmp_path / "root/buckets/gradients/uploads").iterdir())) == 1
    assert await (await s3.get_object(Bucket="gradients", Key="a"))["Body"].read() == b"before"


async def test_a_killed_writer_never_shows(server: Server, s3: Any, tmp_path: Path) -> None:
    """Readers of a key that is continuously overwritten see only whole versions."""
    versions = [bytes([n]) * 300_000 for n in range(5)]
    await s3.put_object(Bucket="gradients", Key="a", Body=versions[0])

    async def write() -> None:
        for version in versions * 3:
            await s3.put_object(Bucket="gradients", Key="a", Body=version)

    async def read() -> None:
        for _ in range(15):
            assert await (await s3.get_object(Bucket="gradients", Key="a"))["Body"].read() in versions

    await asyncio.gather(write(), read(), read())


def test_the_fixture_is_a_full_disk(full_disk: None, tmp_path: Path) -> None:
    draft = Draft(tmp_path, fsync=False)
    draft.write(b"x")
    with pytest.raises(OSError, match="No space left") as caught:
        draft.sync()
    assert caught.value.errno == errno.ENOSPC
    draft.discard()
    assert list(tmp_path.iterdir()) == []

"""Clients with their default settings: aiobotocore, boto3, s3fs, obstore; and pyarrow for reading."""

import asyncio
import base64
import io
import os
import zlib
from typing import Any, cast

import boto3
import pyarrow.fs
import pyarrow.parquet
import pytest
import s3fs
from aiobotocore.session import get_session

from tplr.testing.s3server import Rules, Server

OWNER = "1" * 32
MIB = 2**20


@pytest.fixture
def rules() -> Rules:
    """R2's rules, including parts of 5 MiB, but without the limit on the rate of writes."""
    return Rules(one_write_per_second=False)


@pytest.fixture
def settings(server: Server) -> dict[str, str]:
    """The settings that botocore's clients require; everything else is their default."""
    return {
        "endpoint_url": server.endpoint,
        "region_name": "auto",
        "aws_access_key_id": OWNER,
        "aws_secret_access_key": OWNER * 2,
    }


@pytest.mark.parametrize("size", [0, 3 * MIB])
async def test_aiobotocore(settings: Any, size: int) -> None:
    """It sends a CRC32, and waits for "100 Continue": R2's edge may leave it waiting, this server does not."""
    body, session = os.urandom(size), cast("Any", get_session())
    async with session.create_client("s3", **settings) as s3:
        put = await s3.put_object(Bucket="gradients", Key="a", Body=body)
        assert put["ChecksumCRC32"] == base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
        assert await (await s3.get_object(Bucket="gradients", Key="a"))["Body"].read() == body
        await s3.delete_objects(Bucket="gradients", Delete={"Objects": [{"Key": "a"}]})
        assert (await s3.list_objects_v2(Bucket="gradients"))["KeyCount"] == 0


async def test_boto3(settings: Any) -> None:
    body = os.urandom(17 * MIB)  # two parts of 8 MiB and a rest

    def round_trip() -> bytes:
        s3: Any = boto3.client("s3", **settings)
        s3.put_object(Bucket="gradients", Key="small", Body=b"body")
        s3.upload_fileobj(io.BytesIO(body), "gradients", "large")
        got = io.BytesIO()
        s3.download_fileobj("gradients", "large", got)
        head = s3.head_object(Bucket="gradients", Key="large", ChecksumMode="ENABLED")
        assert head["ChecksumCRC32"].endswith("-3")
        s3.close()
        return got.getvalue()

    assert await asyncio.to_thread(round_trip) == body


async def test_obstore(server: Server) -> None:
    obstore = pytest.importorskip("obstore")
    from obstore.store import S3Store  # pyright: ignore[reportMissingImports]

    body = os.urandom(12 * MIB)
    for checksum in ({}, {"checksum_algorithm": "SHA256"}):
        store = S3Store(
            "gradients",
            endpoint=server.endpoint,
            region="auto",
            access_key_id=OWNER,
            secret_access_key=OWNER * 2,
            client_options={"allow_http": True},
            **checksum,
        )
        put = await obstore.put_async(store, "small", b"body", attributes={"window": "7"})
        with pytest.raises(obstore.exceptions.AlreadyExistsError):
            await obstore.put_async(store, "small", b"BODY", mode="create")
        assert (await obstore.head_async(store, "small"))["e_tag"] == put["e_tag"]
        await obstore.put_async(store, "large", body, chunk_size=5 * MIB)
        got = await obstore.get_async(store, "large")
        assert bytes(await got.bytes_async()) == body
        assert bytes(await obstore.get_range_async(store, "large", start=7 * MIB, length=9)) == body[7 * MIB :][:9]
        assert [entry["path"] for entry in await obstore.list(store).collect_async()] == ["large", "small"]
        await obstore.delete_async(store, ["large", "small"])
        with pytest.raises(FileNotFoundError):
            await obstore.head_async(store, "small")


async def test_s3fs(server: Server) -> None:
    fs = s3fs.S3FileSystem(
        key=OWNER,
        secret=OWNER * 2,
        endpoint_url=server.endpoint,
        client_kwargs={"region_name": "auto"},
        asynchronous=True,
        skip_instance_cache=True,
    )
    session = await fs.set_session()
    try:
        body = os.urandom(5000)
        await fs._pipe_file("gradients/shards/one.parquet", body)
        assert await fs._cat_file("gradients/shards/one.parquet", start=10, end=20) == body[10:20]
        assert await fs._ls("gradients/shards", detail=False) == ["gradients/shards/one.parquet"]
        assert (await fs._info("gradients/shards/one.parquet"))["size"] == 5000
        await fs._rm("gradients/shards/one.parquet")
        assert not await fs._exists("gradients/shards/one.parquet")
    finally:
        await session.close()


async def test_pyarrow_reads_parquet(server: Server, s3: Any) -> None:
    table = pyarrow.table({"text": [f"row {n}" for n in range(1000)]})
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, row_group_size=100)
    await s3.put_object(Bucket="gradients", Key="shards/one.parquet", Body=sink.getvalue().to_pybytes())

    def read() -> Any:
        fs = pyarrow.fs.S3FileSystem(
            access_key=OWNER,
            secret_key=OWNER * 2,
            endpoint_override=server.endpoint.removeprefix("http://"),
            scheme="http",
            region="auto",
        )
        names = [entry.path for entry in fs.get_file_info(pyarrow.fs.FileSelector("gradients/shards"))]
        with fs.open_input_file("gradients/shards/one.parquet") as file:
            return names, pyarrow.parquet.ParquetFile(file).read_row_group(7)

    names, group = await asyncio.to_thread(read)
    assert names == ["gradients/shards/one.parquet"]
    assert group == table.slice(700, 100)

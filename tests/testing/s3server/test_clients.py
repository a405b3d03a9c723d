"""Other clients that this project reads data with: s3fs and pyarrow, and aiobotocore as it comes."""

import asyncio
import os
from typing import Any

import pyarrow.fs
import pyarrow.parquet
import pytest
import s3fs
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from tplr.testing.s3server import Server

OWNER = "1" * 32


async def test_s3fs(server: Server) -> None:
    fs = s3fs.S3FileSystem(
        key=OWNER,
        secret=OWNER * 2,
        endpoint_url=server.endpoint,
        client_kwargs={"region_name": "auto"},
        config_kwargs={"request_checksum_calculation": "when_required", "s3": {"addressing_style": "path"}},
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


@pytest.mark.parametrize("size", [0, 3 * 2**20])
async def test_a_client_that_waits_to_be_told_to_continue(server: Server, size: int) -> None:
    """aiobotocore's default; R2's edge may leave it waiting, this server does not."""
    config = AioConfig(request_checksum_calculation="when_required", s3={"addressing_style": "path"})
    async with get_session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="auto",
        aws_access_key_id=OWNER,
        aws_secret_access_key=OWNER * 2,
        config=config,
    ) as s3:
        await s3.put_object(Bucket="gradients", Key="a", Body=bytes(size))
        assert (await s3.head_object(Bucket="gradients", Key="a"))["ContentLength"] == size

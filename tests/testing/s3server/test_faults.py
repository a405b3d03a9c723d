"""Each fault, from the view of an unmodified client."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import ConnectionClosedError, EndpointConnectionError, HTTPClientError

from tplr.errors import ConfigError
from tplr.testing.s3server import (
    Delay,
    Drip,
    FlipBit,
    FlipSentBit,
    IgnoreDigests,
    Instead,
    LoseResponse,
    Reset,
    Server,
    Status,
    Truncate,
    serve,
)
from tplr.testing.s3server.faults import Faults

BODY = bytes(range(256)) * 16
# aiohttp's client itself sends GET, PUT, DELETE a second time if a connection that it used before breaks.
TWICE = 2
BROKEN = (ConnectionClosedError, EndpointConnectionError, HTTPClientError)


@pytest.fixture
async def stored(s3: Any) -> None:
    await s3.put_object(Bucket="gradients", Key="a", Body=BODY)


async def get(s3: Any) -> bytes:
    return await (await s3.get_object(Bucket="gradients", Key="a"))["Body"].read()


async def test_a_status_so_many_times_and_only_where_it_matches(
    server: Server, s3: Any, stored: None, refusal: Any
) -> None:
    fault = server.faults.add(r"^GET /gradients/a$", Status(429, "TooManyRequests"), times=2)
    await s3.head_object(Bucket="gradients", Key="a")
    for _ in range(2):
        assert await refusal(get(s3)) == (429, "TooManyRequests")
    assert fault.left == 0
    assert await get(s3) == BODY


async def test_faults_for_ever_end_when_they_are_cleared(server: Server, s3: Any, stored: None, refusal: Any) -> None:
    server.faults.add("GET", Status(503, "SlowDown"), times=None)
    for _ in range(3):
        assert await refusal(get(s3)) == (503, "SlowDown")
    server.faults.clear()
    assert await get(s3) == BODY


async def test_an_error_behind_a_200(server: Server, s3: Any) -> None:
    upload_id = (await s3.create_multipart_upload(Bucket="gradients", Key="a"))["UploadId"]
    server.faults.add(r"^POST .*uploadId=", Status(200, "InternalError"))
    with pytest.raises(Exception, match="InternalError"):
        await s3.complete_multipart_upload(
            Bucket="gradients", Key="a", UploadId=upload_id, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": "x"}]}
        )


async def test_a_delay(server: Server, s3: Any, stored: None) -> None:
    server.faults.add("GET", Delay(0.3))
    start = time.monotonic()
    assert await get(s3) == BODY
    assert time.monotonic() - start >= 0.3


async def test_readers_see_different_objects(server: Server, s3: Any, stored: None) -> None:
    await s3.put_object(Bucket="gradients", Key="a.other", Body=b"another")
    server.faults.add("^GET /gradients/a$", Instead(".other"), times=None, every=2)
    assert [await get(s3) for _ in range(4)] == [BODY, b"another", BODY, b"another"]


async def test_rules_come_from_a_file_that_may_change(tmp_path: Path, keys: Any, connect: Any, refusal: Any) -> None:
    file = tmp_path / "faults.json"
    file.write_text("[]")
    async with serve(tmp_path / "root", keys, faults=file) as server:
        s3 = await connect(server)
        await s3.put_object(Bucket="gradients", Key="a", Body=BODY)
        assert await get(s3) == BODY
        rule = {"pattern": "^GET /gradients/a$", "fault": "Status", "status": 503, "code": "SlowDown", "times": 1}
        file.write_text(json.dumps([rule]))
        assert await refusal(get(s3)) == (503, "SlowDown")
        assert await get(s3) == BODY
        file.write_text(json.dumps([rule])[:-1])  # half written: the previous rules stay, with their counts
        assert await get(s3) == BODY


@pytest.mark.parametrize(
    "rules",
    [
        {},
        [7],
        [{"fault": "Reset"}],
        [{"pattern": "x", "fault": "Earthquake"}],
        [{"pattern": "(", "fault": "Reset"}],
        [{"pattern": "x", "fault": "Reset", "seconds": 1}],
    ],
)
def test_a_rule_that_is_none_is_named(tmp_path: Path, rules: Any) -> None:
    (tmp_path / "faults.json").write_text(json.dumps(rules))
    with pytest.raises(ConfigError, match="expected a pattern, a fault of"):
        Faults(tmp_path / "faults.json")


async def test_a_reset_happens_before_anything_is_done(server: Server, s3: Any, stored: None) -> None:
    server.faults.add("^DELETE", Reset(), times=TWICE)
    with pytest.raises(BROKEN):
        await s3.delete_object(Bucket="gradients", Key="a")
    assert await get(s3) == BODY


async def test_a_lost_response_happens_after_everything_is_done(server: Server, s3: Any, stored: None) -> None:
    server.faults.add("^PUT", LoseResponse(), times=TWICE)
    with pytest.raises(BROKEN):
        await s3.put_object(Bucket="gradients", Key="a", Body=b"new")
    assert await get(s3) == b"new"


@pytest.mark.parametrize("reset", [False, True])
async def test_a_body_cut_short(server: Server, s3: Any, stored: None, reset: bool) -> None:
    server.faults.add("^GET", Truncate(1000, reset=reset))
    answer = await s3.get_object(Bucket="gradients", Key="a")
    assert answer["ContentLength"] == len(BODY)
    with pytest.raises((ClientPayloadError, ConnectionError)):
        await answer["Body"].read()
    assert await get(s3) == BODY


async def test_a_flipped_bit_goes_unseen_by_the_client(server: Server, s3: Any, stored: None) -> None:
    server.faults.add("^GET", FlipBit(at=257))
    got = await get(s3)
    assert [index for index in range(len(BODY)) if got[index] != BODY[index]] == [257]
    assert got[257] == BODY[257] ^ 1


async def test_a_bit_flipped_on_the_way_here(server: Server, s3: Any) -> None:
    server.faults.add("^PUT", FlipSentBit(at=257))
    await s3.put_object(Bucket="gradients", Key="a", Body=BODY)
    got = await get(s3)
    assert [index for index in range(len(BODY)) if got[index] != BODY[index]] == [257]


async def test_digests_that_are_ignored(server: Server, s3: Any) -> None:
    server.faults.add("^PUT", IgnoreDigests())
    await s3.put_object(Bucket="gradients", Key="a", Body=BODY, ContentMD5="bm90IHRoZSBib2R5J3MhIQ==")
    assert await get(s3) == BODY


async def test_a_drip(server: Server, s3: Any, stored: None) -> None:
    server.faults.add("^GET", Drip(bytes_per_second=10_000))
    start = time.monotonic()
    assert await get(s3) == BODY
    assert time.monotonic() - start >= len(BODY) / 10_000 * 0.9


async def test_a_stall_sends_headers_only(server: Server, s3: Any, stored: None) -> None:
    server.faults.add("^GET", Drip(0))
    answer = await s3.get_object(Bucket="gradients", Key="a")
    assert answer["ContentLength"] == len(BODY)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await answer["Body"].read(1)

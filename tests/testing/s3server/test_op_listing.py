"""ListObjectsV2 by an unmodified client; ``test_listing.py`` checks the paging against a simple definition."""

from typing import Any

KEYS = ["a", "a/1", "a/2", "b/x/1", "b/x/2", "c d+é", "window-0009", "window-0010"]


async def fill(s3: Any) -> None:
    for key in KEYS:
        await s3.put_object(Bucket="gradients", Key=key, Body=key.encode())


async def test_a_listing_says_what_is_there(s3: Any) -> None:
    await fill(s3)
    answer = await s3.list_objects_v2(Bucket="gradients")
    assert [entry["Key"] for entry in answer["Contents"]] == KEYS
    assert [entry["Size"] for entry in answer["Contents"]] == [len(key.encode()) for key in KEYS]
    assert (answer["KeyCount"], answer["IsTruncated"]) == (len(KEYS), False)
    head = await s3.head_object(Bucket="gradients", Key="a/1")
    assert answer["Contents"][1]["ETag"] == head["ETag"]


async def test_prefix_delimiter_and_start_after(s3: Any) -> None:
    await fill(s3)
    answer = await s3.list_objects_v2(Bucket="gradients", Delimiter="/")
    assert [entry["Key"] for entry in answer["Contents"]] == ["a", "c d+é", "window-0009", "window-0010"]
    assert [entry["Prefix"] for entry in answer["CommonPrefixes"]] == ["a/", "b/"]
    answer = await s3.list_objects_v2(Bucket="gradients", Prefix="b/", Delimiter="/")
    assert [entry["Prefix"] for entry in answer["CommonPrefixes"]] == ["b/x/"]
    answer = await s3.list_objects_v2(Bucket="gradients", Prefix="window-", StartAfter="window-0009")
    assert [entry["Key"] for entry in answer["Contents"]] == ["window-0010"]
    assert (await s3.list_objects_v2(Bucket="gradients", Prefix="none"))["KeyCount"] == 0


async def test_pages(s3: Any) -> None:
    await fill(s3)
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket="gradients", Delimiter="/", PaginationConfig={"PageSize": 2}
    )
    seen = []
    async for page in pages:
        assert page["KeyCount"] <= 2
        seen += [entry["Key"] for entry in page.get("Contents", [])]
        seen += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
    assert sorted(seen) == ["a", "a/", "b/", "c d+é", "window-0009", "window-0010"]


async def test_bad_arguments(s3: Any, refusal: Any) -> None:
    invalid = (400, "InvalidArgument")
    assert await refusal(s3.list_objects_v2(Bucket="gradients", ContinuationToken="not one")) == invalid
    assert await refusal(s3.list_objects_v2(Bucket="gradients", MaxKeys=-1)) == invalid
    assert (await s3.list_objects_v2(Bucket="gradients", MaxKeys=5000))["MaxKeys"] == 1000

"""ListObjectsV2."""

import asyncio
import base64
import binascii
from urllib.parse import quote

from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.request import Reply, S3Request
from tplr.testing.s3server.storage import Storage
from tplr.testing.s3server.xmltext import iso_time

MAX_PAGE = 1000  # entries in one page of any listing


async def list_objects(storage: Storage, request: S3Request) -> Reply:
    if request.query["list-type"] != "2":
        raise S3Error("NotImplemented", "Only version 2 of ListObjects is served.")
    query = request.query
    limit = min(request.number("max-keys", MAX_PAGE), MAX_PAGE)
    token = query.get("continuation-token")
    prefix, delimiter, start_after = query.get("prefix", ""), query.get("delimiter", ""), query.get("start-after", "")
    page, records = await asyncio.to_thread(
        storage.objects.page,
        request.bucket, prefix=prefix, delimiter=delimiter, limit=limit,
        after=start_after if token is None else _read_token(token),
    )  # fmt: skip
    encoding = query.get("encoding-type", "")
    if encoding not in ("", "url"):
        raise S3Error("InvalidArgument", "encoding-type: expected url.")

    def name(text: str) -> str:
        return quote(text, safe="/-_.~") if encoding else text

    return Reply.xml(
        "ListBucketResult",
        {
            "Name": request.bucket,
            "Prefix": name(prefix),
            "Delimiter": name(delimiter) or None,
            "StartAfter": name(start_after) or None,
            "EncodingType": encoding or None,
            "ContinuationToken": token,
            "MaxKeys": limit,
            "KeyCount": len(page.keys) + len(page.prefixes),
            "IsTruncated": "false" if page.resume is None else "true",
            "NextContinuationToken": None if page.resume is None else _token(page.resume),
            "Contents": [
                {
                    "Key": name(record.key),
                    "LastModified": iso_time(record.last_modified),
                    "ETag": f'"{record.etag}"',
                    "Size": record.size,
                    "StorageClass": "STANDARD",
                }
                for record in records
            ],
            "CommonPrefixes": [{"Prefix": name(group)} for group in page.prefixes],
        },
    )


def _token(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode()


def _read_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise S3Error("InvalidArgument", "continuation-token: this server gave out no such token.") from error

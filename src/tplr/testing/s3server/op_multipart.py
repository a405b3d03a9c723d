"""Operations on multipart uploads: create, upload a part, complete, abort, list parts, list uploads."""

import asyncio

from tplr.testing.s3server.body import receive, receive_document
from tplr.testing.s3server.checksums import checksum_tag, multipart_algorithm, sent_checksums
from tplr.testing.s3server.errors import S3Error
from tplr.testing.s3server.multipart import UploadedPart
from tplr.testing.s3server.op_listing import MAX_PAGE
from tplr.testing.s3server.op_objects import kept_headers
from tplr.testing.s3server.preconditions import Conditions
from tplr.testing.s3server.request import Reply, S3Request
from tplr.testing.s3server.storage import Storage
from tplr.testing.s3server.xmltext import iso_time, parse_complete


async def create_upload(storage: Storage, request: S3Request) -> Reply:
    storage.rules.check_key(request.key)
    headers = kept_headers(request.headers)
    storage.rules.check_metadata(headers)
    algorithm = multipart_algorithm(request.headers)
    upload = await asyncio.to_thread(storage.uploads.create, request.bucket, request.key, headers, algorithm)
    return Reply.xml(
        "InitiateMultipartUploadResult",
        {"Bucket": request.bucket, "Key": request.key, "UploadId": upload.upload_id},
    )


async def upload_part(storage: Storage, request: S3Request) -> Reply:
    storage.rules.check_body_length(request.content_length)
    number = request.number("partNumber", 0)
    if not 1 <= number <= storage.rules.max_part_number:
        raise S3Error("InvalidArgument", f"partNumber {number}: expected 1 to {storage.rules.max_part_number}.")
    upload = await asyncio.to_thread(storage.uploads.find, request.bucket, request.key, request.query["uploadId"])
    async with storage.draft() as draft:
        md5 = await receive(request, draft)
        checksums = sent_checksums(request.headers)
        part = UploadedPart(
            number=number, size=draft.size, etag=md5, last_modified=storage.objects.now(), checksums=checksums
        )
        await asyncio.to_thread(storage.uploads.put_part, request.bucket, upload, part, draft)
    return Reply(headers={"ETag": f'"{md5}"', **checksums})


async def complete_upload(storage: Storage, request: S3Request) -> Reply:
    chosen = parse_complete(await receive_document(request))
    upload = await asyncio.to_thread(storage.uploads.find, request.bucket, request.key, request.query["uploadId"])
    storage.admit_write(request)
    record = await asyncio.to_thread(
        storage.uploads.complete, request.bucket, upload, chosen, Conditions.of(request.headers)
    )
    checksums = {checksum_tag(name): value for name, value in record.checksums.items()}
    return Reply.xml(
        "CompleteMultipartUploadResult",
        {"Bucket": request.bucket, "Key": request.key, "ETag": f'"{record.etag}"', **checksums},
    )


async def abort_upload(storage: Storage, request: S3Request) -> Reply:
    upload = await asyncio.to_thread(storage.uploads.find, request.bucket, request.key, request.query["uploadId"])
    await asyncio.to_thread(storage.uploads.abort, request.bucket, upload)
    return Reply(204)


async def list_parts(storage: Storage, request: S3Request) -> Reply:
    limit = min(request.number("max-parts", MAX_PAGE), MAX_PAGE)
    marker = request.number("part-number-marker", 0)
    upload = await asyncio.to_thread(storage.uploads.find, request.bucket, request.key, request.query["uploadId"])
    parts = await asyncio.to_thread(storage.uploads.parts, request.bucket, upload)
    behind = [part for part in parts if part.number > marker]
    page = behind[:limit]
    truncated = 0 < len(page) < len(behind)
    return Reply.xml(
        "ListPartsResult",
        {
            "Bucket": request.bucket,
            "Key": request.key,
            "UploadId": upload.upload_id,
            "PartNumberMarker": marker,
            "NextPartNumberMarker": page[-1].number if truncated else None,
            "MaxParts": limit,
            "IsTruncated": "true" if truncated else "false",
            "Part": [
                {
                    "PartNumber": part.number,
                    "LastModified": iso_time(part.last_modified),
                    "ETag": f'"{part.etag}"',
                    "Size": part.size,
                }
                for part in page
            ],
        },
    )


async def list_uploads(storage: Storage, request: S3Request) -> Reply:
    limit = min(request.number("max-uploads", MAX_PAGE), MAX_PAGE)
    prefix = request.query.get("prefix", "")
    uploads = await asyncio.to_thread(storage.uploads.uploads, request.bucket, prefix)
    key_marker, id_marker = request.query.get("key-marker", ""), request.query.get("upload-id-marker", "")
    behind = [
        upload
        for upload in uploads
        if upload.key > key_marker or (upload.key == key_marker and upload.upload_id > id_marker and id_marker)
    ]
    page = behind[:limit]
    truncated = 0 < len(page) < len(behind)
    return Reply.xml(
        "ListMultipartUploadsResult",
        {
            "Bucket": request.bucket,
            "Prefix": prefix,
            "KeyMarker": key_marker,
            "UploadIdMarker": id_marker,
            "NextKeyMarker": page[-1].key if truncated else None,
            "NextUploadIdMarker": page[-1].upload_id if truncated else None,
            "MaxUploads": limit,
            "IsTruncated": "true" if truncated else "false",
            "Upload": [
                {"Key": upload.key, "UploadId": upload.upload_id, "Initiated": iso_time(upload.initiated)}
                for upload in page
            ],
        },
    )

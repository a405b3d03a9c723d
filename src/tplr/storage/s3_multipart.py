"""The verbs of an upload in parts over S3: what ``S3Store.multipart`` gives."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tplr.errors import StoreUnavailable
from tplr.storage.base import UnfinishedUpload, check_key, check_metadata
from tplr.storage.local_files import disk_errors
from tplr.storage.parts import FilePart
from tplr.storage.s3_body import FileBody

_PAGES = 100
_MD5 = re.compile(r"[0-9a-f]{32}")


class S3Multipart:
    """``Multipart`` over the calls of one ``S3Store``.

    Args:
        call: ``(operation, key, seconds, **parameters)``, the store's guarded request of botocore's client.
        ask: ``(method, key, headers, query=..., body=..., sha256=...)``, its guarded request for or with an object.
        seconds: ``(timeout, upload_size)``, the store's deadlines.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Awaitable[dict[str, Any]]],
        ask: Callable[..., Awaitable[Mapping[str, Any]]],
        seconds: Callable[[float | None, int], float],
    ) -> None:
        self._name = name
        self._call = call
        self._ask = ask
        self._seconds = seconds

    async def create(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        check_key(key)
        checked = check_metadata(metadata)
        answer = await self._call("create_multipart_upload", key, self._seconds(None, 0), Key=key, Metadata=checked)
        return self._upload_id(answer, key)

    async def put_part(self, key: str, upload_id: str, part: FilePart, path: Path, sha256: str | None = None) -> str:
        with disk_errors(self._name, key):
            body = await asyncio.to_thread(FileBody, path, part, hashed=sha256 is None)
        with body:
            query = {"partNumber": str(part.number), "uploadId": upload_id}
            md5 = _etag(await self._ask("PUT", key, {}, query=query, body=body, sha256=sha256))
            # Content-MD5 would have to be known before the first byte is sent; the answer's ETag says as much.
            if not _MD5.fullmatch(md5) or (sha256 is None and md5 != body.md5()):
                raise StoreUnavailable(f"part {part.number} arrived damaged", bucket=self._name, key=key)
        return md5

    async def parts(self, key: str, upload_id: str) -> dict[int, str]:
        found: dict[int, str] = {}
        marker = 0
        for _ in range(_PAGES):
            answer = await self._call(
                "list_parts", key, self._seconds(None, 0), Key=key, UploadId=upload_id, PartNumberMarker=marker
            )
            entries = answer.get("Parts", [])
            found |= {entry.get("PartNumber", 0): _etag(entry) for entry in entries}
            marker = max(found, default=0)
            if not answer.get("IsTruncated") or not entries:
                break
        return found

    async def complete(self, key: str, upload_id: str, md5s: Mapping[int, str]) -> None:
        parts = [{"PartNumber": number, "ETag": f'"{md5s[number]}"'} for number in sorted(md5s)]
        await self._call(
            "complete_multipart_upload",
            key,
            # Some servers join the parts before they answer.
            self._seconds(None, 0) + 0.05 * len(parts),
            Key=key,
            UploadId=upload_id,
            MultipartUpload={"Parts": parts},
        )

    async def abort(self, key: str, upload_id: str) -> None:
        await self._call("abort_multipart_upload", key, self._seconds(None, 0), Key=key, UploadId=upload_id)

    async def unfinished(self, prefix: str = "") -> list[UnfinishedUpload]:
        found: list[UnfinishedUpload] = []
        markers: dict[str, str] = {}
        for _ in range(_PAGES):
            answer = await self._call(
                "list_multipart_uploads", prefix, self._seconds(None, 0), Prefix=prefix, **markers
            )
            entries = [entry for entry in answer.get("Uploads", []) if entry.get("Key", "").startswith(prefix)]
            found += [self._unfinished(entry, prefix) for entry in entries]
            if not answer.get("IsTruncated") or not entries:
                break
            markers = {"KeyMarker": found[-1].key, "UploadIdMarker": found[-1].upload_id}
        return found

    def _unfinished(self, entry: Mapping[str, Any], prefix: str) -> UnfinishedUpload:
        begun = entry.get("Initiated")
        if not isinstance(begun, datetime):
            raise StoreUnavailable("an answer without a usable time", bucket=self._name, key=prefix)
        return UnfinishedUpload(entry["Key"], self._upload_id(entry, prefix), begun.timestamp())

    def _upload_id(self, answer: Mapping[str, Any], key: str) -> str:
        upload_id = answer.get("UploadId", "")
        if not isinstance(upload_id, str) or not re.fullmatch(r"[!-~]{1,1024}", upload_id):
            raise StoreUnavailable("an answer without a usable upload id", bucket=self._name, key=key)
        return upload_id


def _etag(answer: Mapping[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')

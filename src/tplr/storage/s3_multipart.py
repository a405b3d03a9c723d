"""S3's multipart uploads, as ``S3Store.multipart`` provides them."""

import asyncio
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from xml.etree.ElementTree import Element

from tplr.errors import StoreUnavailable
from tplr.storage.base import StoredParts, UnfinishedUpload, check_metadata
from tplr.storage.local_files import disk_errors
from tplr.storage.parts import FilePart
from tplr.storage.s3_body import BytesBody, FileBody
from tplr.storage.s3_client import S3Client, metadata_headers
from tplr.storage.s3_errors import translate_errors
from tplr.storage.s3_response import DocumentResponse, S3Response, xml_time

_MAX_PAGES = 100
_MD5 = re.compile(r"[0-9a-f]{32}")
_UPLOAD_ID = re.compile(r"[!-~]{1,1024}")


class S3Multipart:
    """Multipart uploads, for ``upload_file``. Raises the errors of ``ObjectStore``.

    Every part's ETag must be its MD5 (32 hex digits), as on R2 and on S3 without KMS.
    """

    def __init__(self, client: S3Client) -> None:
        self._client = client
        self._name = client.bucket.name

    async def create(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """Begin an upload; return its id."""
        headers = metadata_headers(check_metadata(metadata))
        response = DocumentResponse(self._name, key)
        begun = await self._client.send("POST", response, headers, query={"uploads": ""})
        return self._upload_id(begun.root, key)

    async def put_part(self, key: str, upload_id: str, part: FilePart, path: Path, sha256: str | None = None) -> str:
        """Store a part of the file at ``path``, replacing an earlier part with the same number; return its MD5.

        Args:
            sha256: expected digest, 64 hex digits. The store checks it, so nothing is hashed here.

        Raises:
            StoreUnavailable: also if the part arrived damaged or does not have ``sha256``. Readers never see it.
        """
        with disk_errors(self._name, key):
            body = await asyncio.to_thread(FileBody, path, part, hashed=sha256 is None)
        with body:
            query = {"partNumber": str(part.number), "uploadId": upload_id}
            sent = await self._client.send("PUT", S3Response(self._name, key), query=query, body=body, sha256=sha256)
            md5 = sent.etag
            # Content-MD5 must be known before the first byte is sent. The ETag proves the same afterwards.
            if not _MD5.fullmatch(md5) or (sha256 is None and md5 != body.md5()):
                raise StoreUnavailable(f"part {part.number} arrived damaged", bucket=self._name, key=key)
        return md5

    async def parts(self, key: str, upload_id: str) -> dict[int, str]:
        """Return number -> MD5 of the stored parts. Raises ObjectNotFound after completion, abortion or expiry."""
        listed = await self._list_parts(key, upload_id)
        return {number: part.findtext("ETag", "").strip('"') for number, part in listed.items()}

    async def stored(self, upload: UnfinishedUpload) -> StoredParts:
        """Return what the upload has stored. Raises ObjectNotFound after completion, abortion or expiry."""
        parts = (await self._list_parts(upload.key, upload.upload_id)).values()
        with translate_errors(self._name, upload.key):
            size = sum(int(part.findtext("Size", "")) for part in parts)
            written = [xml_time(part.findtext("LastModified", "")) for part in parts]
        if None in written:
            raise StoreUnavailable("a response without a usable time", bucket=self._name, key=upload.key)
        return StoredParts(size, max([upload.begun, *(time.timestamp() for time in written if time)]))

    async def _list_parts(self, key: str, upload_id: str) -> dict[int, Element]:
        """Return number -> entry of the stored parts."""
        found: dict[int, Element] = {}
        for _ in range(_MAX_PAGES):
            query = {"uploadId": upload_id, "part-number-marker": str(max(found, default=0))}
            page = (await self._client.send("GET", DocumentResponse(self._name, key), query=query)).root
            with translate_errors(self._name, key):
                entries = page.findall("Part")
                found |= {int(part.findtext("PartNumber", "")): part for part in entries}
            if page.findtext("IsTruncated") != "true" or not entries:
                break
        return found

    async def complete(self, key: str, upload_id: str, md5s: Mapping[int, str]) -> None:
        """Join the parts to one object. ObjectNotFound may mean that an earlier call with a lost response succeeded."""
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>&quot;{md5s[number]}&quot;</ETag></Part>"
            for number in sorted(md5s)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        # Some servers join the parts before they answer.
        client = self._client.within(self._client.limits.call_seconds + 0.05 * len(md5s))
        response, sha256 = DocumentResponse(self._name, key), hashlib.sha256(body).hexdigest()
        await client.send("POST", response, query={"uploadId": upload_id}, body=BytesBody(body), sha256=sha256)

    async def abort(self, key: str, upload_id: str) -> None:
        """Delete an upload and its parts."""
        await self._client.send("DELETE", S3Response(self._name, key), query={"uploadId": upload_id})

    async def unfinished(self, prefix: str = "") -> list[UnfinishedUpload]:
        """List uploads with ``prefix`` that are neither completed nor aborted, ordered by key and id."""
        found: list[UnfinishedUpload] = []
        markers: dict[str, str] = {}
        for _ in range(_MAX_PAGES):
            query = {"uploads": "", "prefix": prefix, **markers}
            page = (await self._client.send("GET", DocumentResponse(self._name, prefix), query=query)).root
            entries = [one for one in page.findall("Upload") if one.findtext("Key", "").startswith(prefix)]
            found += [self._unfinished(entry, prefix) for entry in entries]
            if page.findtext("IsTruncated") != "true" or not entries:
                break
            markers = {"key-marker": found[-1].key, "upload-id-marker": found[-1].upload_id}
        return found

    def _unfinished(self, entry: Element, prefix: str) -> UnfinishedUpload:
        with translate_errors(self._name, prefix):
            begun = xml_time(entry.findtext("Initiated", ""))
        if begun is None:
            raise StoreUnavailable("a response without a usable time", bucket=self._name, key=prefix)
        return UnfinishedUpload(entry.findtext("Key", ""), self._upload_id(entry, prefix), begun.timestamp())

    def _upload_id(self, parent: Element, key: str) -> str:
        upload_id = parent.findtext("UploadId", "")
        if not _UPLOAD_ID.fullmatch(upload_id):
            raise StoreUnavailable("a response without a usable upload id", bucket=self._name, key=key)
        return upload_id

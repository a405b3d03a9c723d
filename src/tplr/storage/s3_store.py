"""``ObjectStore`` over S3."""

import asyncio
import base64
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element

from tplr.errors import ObjectTooLarge, StoreUnavailable
from tplr.schemas import ObjectInfo
from tplr.storage.base import MAX_PUT_BYTES, ObjectStore, Sink, check_metadata, check_range
from tplr.storage.local_files import disk_errors
from tplr.storage.s3_body import Body, BytesBody, FileBody, hash_file
from tplr.storage.s3_client import S3Client, metadata_headers
from tplr.storage.s3_errors import translate_errors
from tplr.storage.s3_multipart import S3Multipart
from tplr.storage.s3_response import DocumentResponse, ObjectResponse, S3Response, object_info, xml_time

_PAGE = 1000


class S3Store(ObjectStore):
    """An ``ObjectStore`` over S3; created by ``S3Connections.store``."""

    def __init__(self, client: S3Client) -> None:
        self.client = client
        self.name = client.bucket.name
        self.multipart = S3Multipart(client)

    def __repr__(self) -> str:
        return f"S3Store({self.client.bucket!r})"

    async def head(self, key: str) -> ObjectInfo:
        return (await self.client.send("HEAD", S3Response(self.name, key))).info()

    async def get(
        self,
        key: str,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
        verify: bool = True,
    ) -> bytes:
        check_range(byte_range, max_bytes, bucket=self.name, key=key)
        response = ObjectResponse(
            self.name, key, max_bytes=max_bytes, if_match=if_match, byte_range=byte_range, verify=verify
        )
        await self.client.send("GET", response)
        return response.body()

    async def receive(
        self,
        key: str,
        sink: Sink,
        *,
        max_bytes: int,
        if_match: str | None = None,
        byte_range: tuple[int, int] | None = None,
    ) -> ObjectInfo:
        check_range(byte_range, max_bytes, bucket=self.name, key=key)
        response = ObjectResponse(
            self.name, key, sink=sink, max_bytes=max_bytes, if_match=if_match, byte_range=byte_range
        )
        await self.client.send("GET", response)
        return response.found

    async def get_piece(
        self, key: str, start: int, max_bytes: int, *, if_match: str | None = None
    ) -> tuple[ObjectInfo, bytes]:
        byte_range = (start, start + max_bytes)
        response = ObjectResponse(
            self.name, key, max_bytes=max_bytes, if_match=if_match, byte_range=byte_range, exact=False
        )
        await self.client.send("GET", response)
        return response.found, response.body()

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        metadata: Mapping[str, str] | None = None,
        create_only: bool = False,
        content_type: str = "",
    ) -> ObjectInfo:
        body = BytesBody(data)
        # Readers may already poll for the object, so the store itself must refuse a damaged one.
        md5 = await asyncio.to_thread(body.md5)
        headers = {"Content-Type": content_type} if content_type else {}
        return await self._put(key, body, md5, headers, metadata=metadata, create_only=create_only)

    async def put_claiming(self, key: str, data: bytes, *, md5: str | None = None, sha256: str | None = None) -> None:
        """Put bytes with hex digests that may be wrong, to test whether the store checks them.

        Raises:
            UploadDamaged: the store checks them.
        """
        response = S3Response(self.name, key)
        await self.client.send("PUT", response, _content_md5(md5), body=BytesBody(data), sha256=sha256)

    async def put_file(
        self,
        key: str,
        path: Path,
        *,
        metadata: Mapping[str, str] | None = None,
        create_only: bool = False,
    ) -> ObjectInfo:
        with disk_errors(self.name, key):
            body = await asyncio.to_thread(FileBody, path)
        with body:
            # A damaged object is put again, unless nothing may be overwritten.
            md5 = await asyncio.to_thread(hash_file, "md5", path) if create_only else None
            return await self._put(key, body, md5, {}, metadata=metadata, create_only=create_only)

    async def delete(self, key: str) -> None:
        await self.client.send("DELETE", S3Response(self.name, key))

    async def list(self, prefix: str = "", *, start_after: str = "", limit: int | None = None) -> list[ObjectInfo]:
        end = time.monotonic() + self.client.limits.call_seconds  # deadline for all pages together
        found: list[ObjectInfo] = []
        token: str | None = None
        while limit is None or len(found) < limit:
            after = found[-1].key if found else start_after
            query = {
                "list-type": "2",
                "prefix": prefix,
                "start-after": after,
                "max-keys": str(_PAGE if limit is None else min(_PAGE, limit - len(found))),
                "encoding-type": "url",
            }
            if token:
                query["continuation-token"] = token
            client = self.client.within(end - time.monotonic())
            page = (await client.send("GET", DocumentResponse(self.name, prefix), query=query)).root
            with translate_errors(self.name, prefix):
                entries = self._entries(page, prefix, after)
            found += entries
            # A page may be empty although there are more. Otherwise the last key says where to go on, on every server.
            token = None if entries else page.findtext("NextContinuationToken")
            if page.findtext("IsTruncated") != "true" or not (entries or token):
                break
        return found[:limit]

    def _entries(self, page: Element, prefix: str, after: str) -> "list[ObjectInfo]":
        """Return the objects of a page. Refuses a listing that does not ascend, because it could be endless."""
        encoded = page.findtext("EncodingType") == "url"
        found: list[ObjectInfo] = []
        for entry in page.findall("Contents"):
            key = entry.findtext("Key", "")
            key = unquote_plus(key) if encoded else key
            if not key.startswith(prefix) or key <= after:
                raise StoreUnavailable("a listing out of order", bucket=self.name, key=prefix)
            size, etag, modified = (entry.findtext(name, "") for name in ("Size", "ETag", "LastModified"))
            found.append(object_info(self.name, key, size=size, etag=etag.strip('"'), modified=xml_time(modified)))
            after = key
        return found

    async def _put(
        self,
        key: str,
        body: Body,
        md5: str | None,
        headers: Mapping[str, str],
        *,
        metadata: Mapping[str, str] | None,
        create_only: bool,
    ) -> ObjectInfo:
        checked = check_metadata(metadata)
        if body.size > MAX_PUT_BYTES:
            raise ObjectTooLarge(
                f"{body.size} bytes; one PUT carries at most {MAX_PUT_BYTES}", bucket=self.name, key=key
            )
        condition = {"If-None-Match": "*"} if create_only else {}
        sent = {**headers, **_content_md5(md5), **metadata_headers(checked), **condition}
        response = await self.client.send("PUT", S3Response(self.name, key), sent, body=body)
        stored = response.stored(body.size, checked)
        if stored.etag != body.md5():  # not every server checks Content-MD5
            raise response.unavailable("the body arrived damaged")
        return stored


def _content_md5(md5: str | None) -> dict[str, str]:
    return {} if md5 is None else {"Content-MD5": base64.b64encode(bytes.fromhex(md5)).decode()}

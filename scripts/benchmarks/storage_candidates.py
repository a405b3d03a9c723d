"""Alternative storage clients with the same checks as ours: (a) aiobotocore with streamed bodies, (b) obstore.

Each has only the part that is measured; ``docs/benchmarks/storage.md`` has the decision. obstore is not a dependency.
"""

import asyncio
import base64
import hashlib
import io
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3
from storage_worker import MIB, PEERS, Known, Plain, bucket_of, peers

from tplr.storage.download import CONCURRENCY
from tplr.storage.many import for_each
from tplr.storage.parts import cut
from tplr.storage.upload import ONE_PUT_PARTS

HERE = {"Bucket": bucket_of(0)}


def md5_of(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.md5(file.read(stop - start), usedforsecurity=False).digest()


def give(sink: Callable[[Any], object], chunks: list[Any]) -> None:
    for chunk in chunks:
        sink(chunk)


async def save(path: Path, known: Known, stream: Callable[..., Any]) -> None:
    """Write each part with ``stream(sink, start, stop)``, and verify it."""
    if path.name.startswith("small"):
        with path.open("wb") as file:
            await stream(file.write, 0, known["size"])
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        return
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, known["size"])

        async def fetch(part: Any) -> None:
            found, at = blake3(), part.start

            def sink(chunk: Any) -> None:
                nonlocal at
                found.update(memoryview(chunk))
                at += os.pwrite(file.fileno(), chunk, at)

            await stream(sink, part.start, part.stop)
            assert found.hexdigest() == known["blake3s"][part.number - 1]

        await for_each(cut(known["size"]), fetch, concurrency=CONCURRENCY)


class Streamed(Plain):
    """(a) aiobotocore alone."""

    async def put(self, key: str, path: Path) -> None:
        client, etags = self.clients[0], {}
        size = await asyncio.to_thread(os.path.getsize, path)
        parts = cut(size)
        if len(parts) <= ONE_PUT_PARTS:
            md5 = base64.b64encode(await asyncio.to_thread(md5_of, path, 0, size)).decode()
            with path.open("rb") as file:
                await client.put_object(**HERE, Key=key, Body=file, ContentMD5=md5)
            return
        upload = {**HERE, "Key": key, "UploadId": (await client.create_multipart_upload(**HERE, Key=key))["UploadId"]}

        async def send(part: Any) -> None:
            md5 = base64.b64encode(await asyncio.to_thread(md5_of, path, part.start, part.stop)).decode()
            with path.open("rb") as file:
                file.seek(part.start)
                body = io.BytesIO(await asyncio.to_thread(file.read, part.stop - part.start))
            sent = await client.upload_part(**upload, PartNumber=part.number, Body=body, ContentMD5=md5)
            etags[part.number] = sent["ETag"]

        await for_each(parts, send, concurrency=CONCURRENCY)
        done = {"Parts": [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]}
        await client.complete_multipart_upload(**upload, MultipartUpload=done)
        await client.head_object(**HERE, Key=key)

    async def stream(self, key: str, sink: Callable[[Any], object], start: int, stop: int) -> None:
        answer = await self.clients[0].get_object(**HERE, Key=key, Range=f"bytes={start}-{stop - 1}")
        chunks: list[bytes] = []
        async with answer["Body"]:
            async for chunk in answer["Body"].raw_stream.content.iter_any():
                chunks.append(chunk)
                if sum(map(len, chunks)) >= MIB:
                    await asyncio.to_thread(give, sink, chunks)
                    chunks = []
        await asyncio.to_thread(give, sink, chunks)

    async def get(self, key: str, path: Path, known: Known) -> None:
        await save(path, known, partial(self.stream, key))

    async def whole(self, peer: int, key: str) -> bytes:
        answer = await self.clients[peer].get_object(Bucket=bucket_of(peer), Key=key)
        buffer = io.BytesIO(bytes(answer["ContentLength"]))
        async with answer["Body"]:
            async for chunk in answer["Body"].raw_stream.content.iter_any():
                buffer.write(chunk)
        return buffer.getvalue()

    async def read(self, key: str) -> None:
        await self.whole(0, key)

    async def gather(self, committed: bool) -> int:
        async def get(peer: int) -> int:
            here = {"Bucket": bucket_of(peer)}
            await self.clients[peer].head_object(**here, Key="update")
            commit = await self.clients[peer].head_object(**here, Key="commit")
            body = await self.whole(peer, "update")
            found = await asyncio.to_thread(hashlib.sha256, body)
            assert found.hexdigest() == commit["Metadata"]["sha256"]
            return len(body)

        return sum(await asyncio.gather(*map(get, range(PEERS))))


class Obstore:
    """(b) obstore, which has no Content-MD5, no verbs for parts, and follows redirects."""

    async def open(self, stack: AsyncExitStack, endpoint: str) -> None:
        import obstore
        from obstore.store import S3Store

        self.obstore: Any = obstore
        self.stores = [
            S3Store(
                bucket.name,
                endpoint=endpoint,
                access_key_id=bucket.access_key_id,
                secret_access_key=bucket.secret_access_key,
                region="auto",
                virtual_hosted_style_request=False,
                unsigned_payload=True,
                client_options={"allow_http": True, "timeout": "300s"},
                retry_config={"max_retries": 0},
            )
            for bucket in peers()
        ]

    async def put(self, key: str, path: Path) -> None:
        parts = cut(await asyncio.to_thread(os.path.getsize, path))
        many, size = len(parts) > ONE_PUT_PARTS, parts[0].stop
        sent = self.obstore.put_async(
            self.stores[0], key, path, use_multipart=many, chunk_size=size, max_concurrency=CONCURRENCY
        )
        md5s = [asyncio.to_thread(md5_of, path, part.start, part.stop) for part in parts]
        await asyncio.gather(sent, *md5s)
        await self.obstore.head_async(self.stores[0], key)

    async def stream(self, key: str, sink: Callable[[Any], object], start: int, stop: int) -> None:
        answer = await self.obstore.get_async(self.stores[0], key, options={"range": (start, stop)})
        chunks: AsyncIterator[Any] = answer.stream(min_chunk_size=MIB)
        async for chunk in chunks:
            await asyncio.to_thread(sink, chunk)

    async def get(self, key: str, path: Path, known: Known) -> None:
        await save(path, known, partial(self.stream, key))

    async def read(self, key: str) -> None:
        await (await self.obstore.get_async(self.stores[0], key)).bytes_async()

    async def gather(self, committed: bool) -> int:
        async def get(store: Any) -> int:
            await self.obstore.head_async(store, "update")
            commit = await self.obstore.get_async(store, "commit")
            body = await (await self.obstore.get_async(store, "update")).bytes_async()
            assert (await asyncio.to_thread(hashlib.sha256, body)).hexdigest() == commit.attributes["sha256"]
            return len(body)

        return sum(await asyncio.gather(*map(get, self.stores)))

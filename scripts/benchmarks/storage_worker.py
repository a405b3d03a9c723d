"""One client of the storage benchmark in a process of its own: jobs come on standard input, figures go to its output.

python scripts/benchmarks/storage_worker.py CLIENT ENDPOINT
"""

import asyncio
import base64
import hashlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypedDict

from blake3 import blake3

MIB = 2**20
PEERS, PEER_MIB = 15, 16
CLIENTS = ("ours", "aiobotocore, unsigned", "aiobotocore, checked", "aiobotocore", "boto3")
ACCOUNT = "a" * 32


def keys_of(peer: int) -> tuple[str, str]:
    """Access key id and secret of bucket ``peer``: a client each, as peers on the network have."""
    return hashlib.md5(b"%d" % peer).hexdigest(), hashlib.sha256(b"%d" % peer).hexdigest()  # noqa: S324


def bucket_of(peer: int) -> str:
    return f"bucket-{peer}"


def memory(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{field}:")[2].split()[0])


class Known(TypedDict):
    """What a checkpoint's manifest says of an object; ``blake3``, of all of it, is for who checks in one go."""

    size: int
    blake3: str
    blake3s: list[str]


def known_of(body: bytes) -> Known:
    from tplr.storage.parts import cut

    blake3s = [blake3(body[part.start : part.stop]).hexdigest() for part in cut(len(body))]
    return {"size": len(body), "blake3": blake3(body).hexdigest(), "blake3s": blake3s}


class Ours:
    """``tplr.storage`` and ``tplr.exchange``."""

    async def open(self, stack: AsyncExitStack, endpoint: str) -> None:
        from tplr.schemas import Bucket
        from tplr.storage import S3Connections

        connections = await stack.enter_async_context(S3Connections(endpoint))
        self.stores = [
            connections.store(
                Bucket(name=bucket_of(peer), account_id=ACCOUNT, access_key_id=key, secret_access_key=secret)
            )
            for peer, (key, secret) in enumerate(map(keys_of, range(PEERS)))
        ]

    async def put(self, key: str, path: Path) -> None:
        from tplr.storage import upload_file

        await upload_file(self.stores[0], key, path)

    async def get(self, key: str, path: Path, known: Known) -> None:
        from tplr.storage import download_file

        if path.name.startswith("small"):  # as documents and updates are read
            await self.stores[0].get_file(key, path, max_bytes=2**40)
        else:
            await download_file(self.stores[0], key, path, size=known["size"], blake3s=known["blake3s"])

    async def read(self, key: str) -> None:
        await self.stores[0].get(key, max_bytes=2**40)

    async def put_peers(self, body: bytes) -> None:
        from tplr.exchange.gather import HASH_FIELD

        sha256 = hashlib.sha256(body).hexdigest()
        commits = [await store.put("commit", b"", metadata={HASH_FIELD: sha256}) for store in self.stores]
        self.start = max(commit.last_modified for commit in commits)
        for store in self.stores:
            await store.put("update", body)

    async def gather(self) -> int:
        from tplr.exchange.gather import GatherRules, gather
        from tplr.schemas import UploadBounds

        rules = GatherRules(
            window=1,
            key_of=lambda uid: "update",
            commit_key_of=lambda uid: "commit",
            bounds=UploadBounds(start=self.start, end=time.time() + 60),
            closes_in=0.0,
            patience=60.0,
            size=PEER_MIB * MIB,
            parse=lambda body, uid: body,
        )
        result = await gather(range(PEERS), self.stores.__getitem__, rules)
        assert result.bytes == PEERS * PEER_MIB * MIB, result.skipped
        return result.bytes


class Aiobotocore:
    """Its calls, one for each object, with the two settings without which R2 refuses them."""

    signed = True

    async def open(self, stack: AsyncExitStack, endpoint: str) -> None:
        from aiobotocore.config import AioConfig
        from aiobotocore.session import AioSession

        session = AioSession()
        config = AioConfig(
            signature_version="s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=64,
            s3={"addressing_style": "path"} | ({} if self.signed else {"payload_signing_enabled": False}),
        )
        self.clients = [
            await stack.enter_async_context(
                session.create_client(
                    "s3",
                    endpoint_url=endpoint,
                    region_name="auto",
                    aws_access_key_id=key,
                    aws_secret_access_key=secret,
                    config=config,
                )
            )
            for key, secret in map(keys_of, range(PEERS))
        ]

    async def put(self, key: str, path: Path) -> None:
        with path.open("rb") as file:
            await self.clients[0].put_object(Bucket=bucket_of(0), Key=key, Body=file)

    async def get(self, key: str, path: Path, known: Known) -> None:
        answer = await self.clients[0].get_object(Bucket=bucket_of(0), Key=key)
        with path.open("wb") as file:
            async for chunk in answer["Body"].iter_chunks(MIB):
                file.write(chunk)

    async def read(self, key: str) -> None:
        answer = await self.clients[0].get_object(Bucket=bucket_of(0), Key=key)
        await answer["Body"].read()

    async def gather(self) -> int:
        async def get(peer: int) -> bytes:
            answer = await self.clients[peer].get_object(Bucket=bucket_of(peer), Key="update")
            async with answer["Body"] as body:
                return await self.checked(await body.read())

        bodies = await asyncio.gather(*map(get, range(PEERS)))
        return sum(map(len, bodies))

    async def checked(self, body: bytes) -> bytes:
        return body


class Unsigned(Aiobotocore):
    """As we send: without a SHA-256 of the body in the signature."""

    signed = False


class Checked(Unsigned):
    """With our checks: MD5 of what is sent, BLAKE3 of what comes, SHA-256 of what is gathered."""

    async def put(self, key: str, path: Path) -> None:
        with path.open("rb") as file:
            md5 = base64.b64encode((await asyncio.to_thread(hashlib.file_digest, file, "md5")).digest()).decode()
            file.seek(0)
            await self.clients[0].put_object(Bucket=bucket_of(0), Key=key, Body=file, ContentMD5=md5)

    async def get(self, key: str, path: Path, known: Known) -> None:
        answer = await self.clients[0].get_object(Bucket=bucket_of(0), Key=key)
        found = blake3()
        with path.open("wb") as file:
            async for chunk in answer["Body"].iter_chunks(MIB):
                file.write(chunk)
                found.update(chunk)
        assert found.hexdigest() == known["blake3"]

    async def checked(self, body: bytes) -> bytes:
        await asyncio.to_thread(hashlib.sha256, body)
        return body


class Boto3:
    """Its transfer manager, in parts and threads, as it comes."""

    async def open(self, stack: AsyncExitStack, endpoint: str) -> None:
        import boto3
        from botocore.config import Config

        key, secret = keys_of(0)
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="auto",
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            config=Config(
                signature_version="s3v4",
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path"},
            ),
        )
        stack.callback(self.client.close)

    async def put(self, key: str, path: Path) -> None:
        self.client.upload_file(str(path), bucket_of(0), key)

    async def get(self, key: str, path: Path, known: Known) -> None:
        self.client.download_file(bucket_of(0), key, str(path))

    async def read(self, key: str) -> None:
        self.client.get_object(Bucket=bucket_of(0), Key=key)["Body"].read()


KINDS: dict[str, Any] = dict(zip(CLIENTS, (Ours, Unsigned, Checked, Aiobotocore, Boto3), strict=True))


async def work(kind: str, endpoint: str) -> None:
    """Answer each job with its seconds, this process's CPU seconds, and its peak memory above idle, in bytes."""
    client: Any = KINDS[kind]()
    async with AsyncExitStack() as stack:
        await client.open(stack, endpoint)
        idle = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            job = json.loads(line)
            jobs: dict[str, Callable[[], Awaitable[Any]]] = {
                "put": lambda: client.put(job["key"], Path(job["path"])),  # noqa: B023 - done within its turn
                "get": lambda: client.get(job["key"], Path(job["path"]), job["known"]),  # noqa: B023
                "read": lambda: client.read(job["key"]),  # noqa: B023
                "prepare": lambda: client.put_peers(bytes(PEER_MIB * MIB)),
                "gather": lambda: client.gather(),  # noqa: PLW0108 - boto3 has none
            }
            Path("/proc/self/clear_refs").write_text("5")  # noqa: ASYNC240 - the peak begins anew
            began, cpu = time.perf_counter(), time.process_time()
            await jobs[job["do"]]()
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            idle = idle or memory("VmRSS")  # after a first small job: everything is imported and connected
            print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": memory("VmHWM") - idle}), flush=True)


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))

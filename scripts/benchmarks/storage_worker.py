"""One client of the storage benchmark in a separate process: reads jobs from standard input, writes figures to its
output.

python scripts/benchmarks/storage_worker.py CLIENT ENDPOINT
"""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypedDict

from blake3 import blake3

from tplr.schemas import Bucket

MIB = 2**20
PEERS, PEER_MIB = 15, 16
CLIENTS = ("ours", "before", "plain aiobotocore", "(a) aiobotocore", "(b) obstore")
ACCOUNT = "a" * 32


def keys_of(peer: int) -> tuple[str, str]:
    """Return the access key id and secret of bucket ``peer``: one client each, like peers on the network."""
    return hashlib.md5(b"%d" % peer).hexdigest(), hashlib.sha256(b"%d" % peer).hexdigest()  # noqa: S324


def bucket_of(peer: int) -> str:
    return f"bucket-{peer}"


def peers() -> list[Bucket]:
    """Return the buckets with their keys."""
    keys = map(keys_of, range(PEERS))
    return [
        Bucket(name=bucket_of(peer), account_id=ACCOUNT, access_key_id=key, secret_access_key=secret)
        for peer, (key, secret) in enumerate(keys)
    ]


def memory(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{field}:")[2].split()[0])


class Known(TypedDict):
    """An object's entry in a checkpoint's manifest; ``blake3`` of the whole object is for clients without parts."""

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
        from tplr.storage import S3Connections

        connections = await stack.enter_async_context(S3Connections(endpoint))
        self.stores = [connections.store(peer) for peer in peers()]

    async def put(self, key: str, path: Path) -> None:
        from tplr.storage import upload_file

        await upload_file(self.stores[0], key, path)

    async def get(self, key: str, path: Path, known: Known) -> None:
        from tplr.storage import download_file

        if path.name.startswith("small"):  # like documents and updates
            await self.stores[0].get_file(key, path, max_bytes=2**40)
        else:
            await download_file(self.stores[0], key, path, size=known["size"], blake3s=known["blake3s"])

    async def read(self, key: str) -> None:
        await self.stores[0].get(key, max_bytes=2**40)

    async def put_peers(self, body: bytes) -> None:
        from tplr.exchange.gather import HASH_FIELD

        metadata = {HASH_FIELD: hashlib.sha256(body).hexdigest()}
        for store in self.stores:
            await store.put("commit", b"", metadata=metadata)
        for store in self.stores:
            await store.put("update", body)

    async def gather(self, committed: bool) -> int:
        """Gather by the hash in each peer's commit, or by hashes known from an included set."""
        from tplr.exchange.gather import GatherRules, gather
        from tplr.schemas import UploadBounds

        class Rules(GatherRules[bytes]):
            def key(self, uid: int) -> str:
                return "update"

            def commit_key(self, uid: int) -> str | None:
                return "commit" if committed else None

            def parse(self, body: bytes, uid: int) -> bytes:
                return body

        start = max([(await store.head("commit")).last_modified for store in self.stores])
        sha256 = hashlib.sha256(bytes(PEER_MIB * MIB)).hexdigest()
        rules = Rules(
            window=1,
            sha256s={} if committed else dict.fromkeys(range(PEERS), sha256),
            bounds=UploadBounds(start=start, end=time.time() + 60),
            closes_in=0.0,
            patience=60.0,
            size=PEER_MIB * MIB,
        )
        result = await gather(dict(enumerate(self.stores)), rules)
        assert result.bytes == PEERS * PEER_MIB * MIB, result.skipped
        return result.bytes


class Plain:
    """aiobotocore, one call for each object, without hashes and verification."""

    async def open(self, stack: AsyncExitStack, endpoint: str) -> None:
        from plain_s3 import plain_client

        self.clients = [await stack.enter_async_context(plain_client(endpoint, peer)) for peer in peers()]

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

    async def gather(self, committed: bool) -> int:
        async def get(peer: int) -> bytes:
            answer = await self.clients[peer].get_object(Bucket=bucket_of(peer), Key="update")
            async with answer["Body"] as body:
                return await body.read()

        return sum(map(len, await asyncio.gather(*map(get, range(PEERS)))))


def kinds() -> dict[str, Any]:
    from storage_candidates import Obstore, Streamed

    # "before" is this project's client from another source tree; see ``storage.py``.
    return dict(zip(CLIENTS, (Ours, Ours, Plain, Streamed, Obstore), strict=True))


async def work(kind: str, endpoint: str) -> None:
    """Answer each job with its seconds, this process's CPU seconds, and its peak memory above idle, in bytes."""
    client: Any = kinds()[kind]()
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
                "gather": lambda: client.gather(True),
                "gather by hash": lambda: client.gather(False),
            }
            Path("/proc/self/clear_refs").write_text("5")  # noqa: ASYNC240 - resets the peak
            began, cpu = time.perf_counter(), time.process_time()
            await jobs[job["do"]]()
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            idle = idle or memory("VmRSS")  # after a first small job, so that everything is imported and connected
            print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": memory("VmHWM") - idle}), flush=True)


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))

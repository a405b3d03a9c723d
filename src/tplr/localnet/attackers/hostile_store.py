"""A hostile node's bucket: forges the node's honest writes by a plan of windows."""

import asyncio
import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tplr.exchange.envelope import body_of
from tplr.exchange.snapshot import MANIFEST, SnapshotManifest
from tplr.files import atomic_write
from tplr.localnet.attackers.forgery import Behaviour, behaviour, bomb, falsified, with_false_hashes
from tplr.localnet.attackers.nan_checkpoint import write_nan_shards
from tplr.localnet.attackers.sealing import Sealer
from tplr.schemas import ObjectInfo
from tplr.seeds import derive
from tplr.storage.s3_client import S3Client
from tplr.storage.s3_store import S3Store

OTHER = ".other"  # suffix of the object that a reader gets in place of the true one
HANG_SECONDS = 60.0  # longer than any deadline
# The first number in an object's name that is not part of a version. Documents on the run's start have a uid there.
WINDOW = re.compile(r"^(?!\w+-start-)[a-z-]+[-_](\d{1,15})(?=[-_./])")


class Plot:
    """The plan of a hostile node: its behaviour in each window, and the faults of its buckets' server.

    Args:
        faults: the storage server's file of faults, which controls how this node's buckets answer.
        hang_seconds: seconds for which its buckets do not answer in a window with behaviour ``hang``.
        on_attack: called with window, behaviour and key of each forgery.
    """

    def __init__(
        self, seed: int, faults: Path, *, hang_seconds: float, on_attack: Callable[[int, str, str], None]
    ) -> None:
        self._seed = seed
        self._faults = faults
        self._hang_seconds = hang_seconds
        self._on_attack = on_attack
        self._hung: set[tuple[str, int]] = set()
        self._rules: list[dict[str, Any]] = []

    def behaviour(self, key: str) -> Behaviour:
        """Return the behaviour in the window of an object's name; window 0 if the name has none."""
        return behaviour(self._seed, window_of(key))

    def random(self, key: str) -> random.Random:
        """Return a random stream for the forgeries of one object."""
        return random.Random(derive("forgery", self._seed, key))

    def note(self, behaviour: str, key: str) -> None:
        """Report a forgery."""
        self._on_attack(window_of(key), behaviour, key)

    async def show_others(self, bucket: str, key: str) -> None:
        """From now on, answer every second read of an object with the one at ``key + OTHER``."""
        for method in ("GET", "HEAD"):
            pattern = f"^{method} /{re.escape(bucket)}/{re.escape(key)}$"
            await self._add({"pattern": pattern, "fault": "Instead", "suffix": OTHER, "every": 2})

    async def hang(self, bucket: str, window: int) -> None:
        """Let the bucket answer no reader for ``hang_seconds``, at most once per window."""
        if (bucket, window) in self._hung:
            return
        self._hung.add((bucket, window))
        rule = {"pattern": f"^(GET|HEAD) /{re.escape(bucket)}[/?]", "fault": "Delay", "seconds": HANG_SECONDS}
        await self._add(rule)
        asyncio.get_running_loop().call_later(self._hang_seconds, self._remove, rule)

    async def _add(self, rule: dict[str, Any]) -> None:
        if rule not in self._rules:
            self._rules.append(rule)
            await asyncio.to_thread(self._write)

    def _remove(self, rule: dict[str, Any]) -> None:
        self._rules.remove(rule)
        self._write()  # only a few bytes, so it may block

    def _write(self) -> None:
        atomic_write(self._faults, json.dumps(self._rules).encode())


def window_of(key: str) -> int:
    """Return the window in an object's name; 0 if it has none."""
    found = WINDOW.match(key)
    return int(found[1]) if found else 0


class HostileStore(S3Store):
    """The node's own bucket, opened for writing. Forges documents, checkpoints and aggregates, and nothing else."""

    def __init__(self, client: S3Client, plot: Plot, sealer: Sealer) -> None:
        super().__init__(client)
        self._plot = plot
        self._sealer = sealer

    async def put(
        self,
        key: str,
        data: bytes,
        *,
        metadata: Mapping[str, str] | None = None,
        create_only: bool = False,
        content_type: str = "",
    ) -> ObjectInfo:
        plot, other = self._plot, None
        behaviour = plot.behaviour(key) if key.endswith((".json", ".safetensors")) else "honest"
        if behaviour != "honest":
            if key.endswith("/" + MANIFEST):
                behaviour, data = "nan-checkpoint", await self._nan_checkpoint(key, data)
            elif behaviour == "hang":
                await plot.hang(self.name, window_of(key))
            elif behaviour != "silent":
                forged = await self._forged(behaviour, key, data)
                behaviour = "honest" if forged == data else behaviour
                data, other = (data, forged) if behaviour == "equivocate" else (forged, None)
        if behaviour != "honest":
            plot.note(behaviour, key)
        if behaviour == "silent":
            return ObjectInfo(key=key, size=len(data), etag="", last_modified=time.time())
        info = await super().put(key, data, metadata=metadata, create_only=create_only, content_type=content_type)
        if other is not None:
            await super().put(key + OTHER, other)
            await plot.show_others(self.name, key)
        return info

    async def _forged(self, behaviour: Behaviour, key: str, data: bytes) -> bytes:
        """Return a forged document with the envelope of ``data``, or noise in place of an aggregate."""
        random = self._plot.random(key)
        if not key.endswith(".json"):
            return random.randbytes(len(data))
        if behaviour in ("equivocate", "false-set") and (other := self._sealer.other_proposal(data)):
            return other
        forge = {"bomb": bomb, "false-fingerprint": with_false_hashes}.get(behaviour, falsified)
        body = self._sealer.body(data)
        false = await asyncio.to_thread(forge, body, random)
        return data if false == body else self._sealer.sealed(data, false)

    async def _nan_checkpoint(self, key: str, data: bytes) -> bytes:
        """Replace the shards of a checkpoint; return its new manifest."""
        manifest = SnapshotManifest.model_validate_json(self._sealer.body(data))
        with tempfile.TemporaryDirectory() as folder:
            false = await asyncio.to_thread(write_nan_shards, Path(folder), manifest)
            for shard in false.shards:
                await self.put_file(key.removesuffix(MANIFEST) + shard.name, Path(folder) / shard.name)
        return self._sealer.sealed(data, body_of(false))

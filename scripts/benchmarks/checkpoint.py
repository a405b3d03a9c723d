"""Measures a checkpoint of 150 million parameters on a CPU: pause, memory, and upload compared with plain multipart.

One process trains (DeMo) with and without a background save, alternating; the pause is the difference for the same
batches. SparseLoCo changes the weights during local training, so there the pause is the whole save. This package and
plain aiobotocore alternate in uploading the same shards to one server (R2's rules, a separate process); each upload
runs twice in a row, and the second run is reported.

    python scripts/benchmarks/checkpoint.py [--repetitions 3]

Prints the medians, and writes ``docs/benchmarks/checkpoint.csv`` and ``checkpoint.png``.
"""

import argparse
import asyncio
import csv
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from pictures import redraw
from plain_s3 import plain_client
from s3_process import start_server

from tplr.chain.hotkeys import new_hotkey
from tplr.exchange.checkpoints import publish
from tplr.exchange.envelope import Run, Signer
from tplr.exchange.snapshot import read_manifest
from tplr.hparams import HParams
from tplr.node.train_state import TrainState
from tplr.schemas import Bucket
from tplr.storage import S3Connections
from tplr.training.model import build_model

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
PROFILE = Path(__file__).parents[2] / "hparams-demo.json"
MODEL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12}
SHAPE = (1, 128)  # sequences and tokens of a batch
BATCHES = 8
BLOCK_SECONDS = 12.0
PART = 16 * 2**20
KEY, SECRET, BUCKET = "0123456789abcdef" * 2, "fedcba9876543210" * 4, "b" * 32
LIMITS = {"pause, share of a window": 0.02, "upload, ours to plain": 0.9}


def memory(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0])


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def prepare(folder: Path) -> tuple[TrainState, np.ndarray, HParams]:
    raw = json.loads(PROFILE.read_text())
    raw["model"] |= MODEL | {"num_key_value_heads": MODEL["num_attention_heads"]}
    raw |= {"sequence_length": SHAPE[1], "batch_size": SHAPE[0], "precision": "float32"}
    hparams = HParams.model_validate(raw)
    train_state = TrainState(build_model(hparams), hparams, folder / "state")
    train_state.start_window = 0
    batches = np.random.default_rng(0).integers(0, raw["model"]["vocab_size"], (BATCHES, *SHAPE))
    work = train_state.local.run(train_state.model, batches[:1], step=0)
    # Packing creates the momentum that is saved.
    train_state.outer.pack(work.tensors, step=0, window=0, uid=0, pages_digest="0" * 64, batches=1)
    return train_state, batches, hparams


def measure_saving(train_state: TrainState, batches: np.ndarray, repetition: int) -> dict[str, float]:
    def train() -> float:
        return timed(lambda: train_state.local.run(train_state.model, batches, step=1))

    with ThreadPoolExecutor(1) as background:

        def both() -> tuple[float, float]:
            saving = background.submit(timed, lambda: train_state.save(repetition, {}))
            seconds = train()
            saved = saving.result()
            return max(seconds, saved), saved  # packing would wait for the save

        first = repetition % 2 == 0
        alone = train() if first else 0.0
        together, saved = both()
        alone = alone or train()
    idle = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    save_alone = timed(lambda: train_state.save(repetition, {}))
    return {
        "training, s": alone,
        "training beside a save, s": together,
        "save beside training, s": saved,
        "save alone, s": save_alone,
        "peak extra memory, MB": (memory("VmHWM") - idle) / 1e6,
    }


async def plain_multipart(client: Any, prefix: str, paths: list[Path]) -> None:
    """Upload parts of 16 MiB, four at a time, without hashes and without listing existing parts."""
    slots = asyncio.Semaphore(4)
    for path in paths:
        key = f"{prefix}{path.name}"
        upload = (await client.create_multipart_upload(Bucket=BUCKET, Key=key))["UploadId"]

        async def send(number: int, path: Path = path, key: str = key, upload: str = upload) -> dict[str, Any]:
            async with slots:
                body = await asyncio.to_thread(_read, path, (number - 1) * PART)
                answer = await client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        count = -(-path.stat().st_size // PART)
        parts = await asyncio.gather(*(send(number) for number in range(1, count + 1)))
        await client.complete_multipart_upload(
            Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
        )


def _read(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(PART)


async def measure_upload(endpoint: str, folder: Path, repetitions: int) -> list[dict[str, float]]:
    bucket = Bucket(name=BUCKET, account_id="a" * 32, access_key_id=KEY, secret_access_key=SECRET)
    shards = await asyncio.to_thread(lambda: sorted(folder.glob("shard-*")))
    signer = Signer.with_key(Run(0, (await asyncio.to_thread(read_manifest, folder)).version), 1, new_hotkey())
    rows = []
    for shard in shards:
        await asyncio.to_thread(shard.read_bytes)  # into the page cache
    async with AsyncExitStack() as stack:
        store = (await stack.enter_async_context(S3Connections(endpoint))).store(bucket)
        client = await stack.enter_async_context(plain_client(endpoint, bucket))
        for repetition in range(repetitions):
            row = {}
            for kind in ("ours", "plain")[:: 1 if repetition % 2 else -1]:
                await asyncio.to_thread(os.sync)
                for _ in range(2):  # the second run is reported: the first one faults in memory that the host reclaimed
                    for info in await store.list(""):
                        await store.delete(info.key)
                    began = time.perf_counter()
                    if kind == "ours":
                        await publish(store, folder, signer=signer, keep_last=1)
                    else:
                        await plain_multipart(client, f"plain-{repetition}-", shards)
                    row[f"upload {kind}, s"] = time.perf_counter() - began
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    repetitions = parser.parse_args().repetitions
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        train_state, batches, hparams = prepare(folder)
        window = hparams.blocks_per_window * BLOCK_SECONDS
        print("prepared", flush=True)
        rows = [measure_saving(train_state, batches, number) for number in range(repetitions)]
        snapshot = folder / "state" / f"window-{repetitions - 1}"
        size = sum(path.stat().st_size for path in snapshot.iterdir())
        keys = {KEY: {"secret": SECRET, "buckets": {BUCKET: "read-write"}}}
        endpoint = start_server(folder, stack, keys, "--no-write-rate")
        uploads = asyncio.run(measure_upload(endpoint, snapshot, repetitions))
    for row, upload in zip(rows, uploads, strict=True):
        row.update(upload)
        row["pause, share of a window"] = (row["training beside a save, s"] - row["training, s"]) / window
        row["upload, ours to plain"] = row["upload plain, s"] / row["upload ours, s"]
    parameters = sum(one.numel() for one in train_state.parameters.values())
    print(f"{parameters / 1e6:.0f}M parameters, a snapshot of {size / 1e6:.0f} MB, a window of {window:.0f} s")
    for name in rows[0]:
        low, middle, high = statistics.quantiles([row[name] for row in rows], n=4, method="inclusive")
        limit = f"   limit {LIMITS[name]}" if name in LIMITS else ""
        print(f"{name:32} {middle:10.3f}   [{low:.3f}, {high:.3f}]{limit}")
    with (FOLDER / "checkpoint.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    redraw("checkpoint")


if __name__ == "__main__":
    main()

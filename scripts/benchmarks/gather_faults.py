"""Measures a gather with 5 of 20 buckets dead, hanging, dripping or huge, compared with a gather of only the other 15.

    python scripts/benchmarks/gather_faults.py [--repetitions 7]

Real packed updates over HTTP from the project's S3 server, gathered at the moment when a window's time bound passes, by
the rules of a live window. Each repetition measures the baseline and then all faults. Limit: 1.2 times the baseline,
plus the two seconds until the last poll (``STORE_CLOCK_SECONDS``). Writes docs/benchmarks/gather_faults.csv and its
picture.
"""

import argparse
import asyncio
import csv
import hashlib
import statistics
import tempfile
import time
from pathlib import Path

import torch
from pictures import redraw

from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import build
from tplr.exchange.gather import gather
from tplr.exchange.updates import STORE_CLOCK_SECONDS, UpdateRules, put_commit, put_update
from tplr.keys import gradient_key
from tplr.schemas import Bucket, UploadBounds
from tplr.storage import ObjectStore, S3Connections
from tplr.testing.s3server import Delay, Drip, Rules, Server, serve

TABLE = Path(__file__).parents[2] / "docs" / "benchmarks" / "gather_faults.csv"
PEERS, FAULTY = 20, range(5)
WINDOW, VERSION = 7, "1"
END = 1_700_000_000.0
SPEC = PayloadSpec.of({"w": (2048, 2048)}, outer="demo", target_chunk=64, topk=32, bits=2)
KINDS = ("dead", "hanging", "dripping", "huge")


def bucket_of(uid: int) -> Bucket:
    digits = f"{uid:032x}"
    return Bucket(name=f"peer-{uid}", account_id=digits, access_key_id=digits, secret_access_key=digits * 2)


def body_of(uid: int) -> bytes:
    generator = torch.Generator().manual_seed(uid)
    tensor = SPEC.tensors["w"]
    order = torch.rand(tensor.grid.chunks, tensor.grid.entries, generator=generator).argsort(dim=1)
    values = torch.randn(tensor.grid.chunks, tensor.k, generator=generator)
    coefficients = {"w": (order[:, : tensor.k].sort(dim=1).values, values)}
    return build(coefficients, SPEC, window=WINDOW, uid=uid, pages_digest="0a" * 32, batches=3)


class Network:
    """Twenty buckets on one server, with a clock for their time stamps that a writer sets."""

    def __init__(self) -> None:
        self.now = END

    async def publish(self, stores: dict[int, ObjectStore]) -> None:
        for uid, store in stores.items():
            body = await asyncio.to_thread(body_of, uid)
            self.now = END - 3
            await put_commit(store, WINDOW, uid, hashlib.sha256(body).hexdigest(), VERSION)
            self.now = END + 2
            await put_update(store, WINDOW, uid, body, VERSION, deadline_seconds=60)


def break_buckets(server: Server, kind: str) -> None:
    """Make later requests for the updates of the faulty buckets fail."""
    server.faults.clear()
    actions = {"hanging": ("HEAD", Delay(3600)), "dripping": ("GET", Drip(1000))}
    if kind in actions:
        method, action = actions[kind]
        for uid in FAULTY:
            server.faults.add(f"^{method} /{bucket_of(uid).name}/gradient", action, times=None)


async def timed(stores: dict[int, ObjectStore], *, expected: int) -> float:
    rules = UpdateRules(
        window=WINDOW,
        version=VERSION,
        bounds=UploadBounds(END, END + 10),
        closes_in=STORE_CLOCK_SECONDS,
        patience=0.0,
        size=SPEC.expected_size,
        spec=SPEC,
        require_commit=True,
    )
    began = time.perf_counter()
    found = await gather(stores, rules)
    seconds = time.perf_counter() - began
    if len(found.updates) != expected:
        raise SystemExit(f"{len(found.updates)} updates gathered, expected {expected}: {found.skipped}")
    return seconds


async def measure(folder: Path, repetitions: int) -> list[dict[str, object]]:
    network = Network()
    keys = {
        bucket_of(uid).access_key_id: {
            "secret": bucket_of(uid).secret_access_key,
            "buckets": {bucket_of(uid).name: "read-write"},
        }
        for uid in range(PEERS)
    }
    rules = Rules(one_write_per_second=False, max_clock_skew=1e12)
    rows: list[dict[str, object]] = []
    async with (
        serve(folder, keys, rules=rules, clock=lambda: network.now) as server,
        S3Connections(server.endpoint) as connections,
        # No server listens on this port, so connections are refused.
        S3Connections("http://127.0.0.1:9") as nowhere,
    ):
        stores: dict[int, ObjectStore] = {uid: connections.store(bucket_of(uid)) for uid in range(PEERS)}
        await network.publish(stores)
        honest = {uid: store for uid, store in stores.items() if uid not in FAULTY}
        await timed(honest, expected=len(honest))  # opens the connections
        for repetition in range(repetitions):
            server.faults.clear()
            alone = await timed(honest, expected=len(honest))
            for kind in KINDS:
                faulty = {uid: nowhere.store(bucket_of(uid)) for uid in FAULTY} if kind == "dead" else {}
                if kind == "huge":
                    for uid in FAULTY:
                        key = gradient_key(WINDOW, uid, VERSION)
                        await stores[uid].put(key, bytes(SPEC.expected_size + 2**24))
                break_buckets(server, kind)
                seconds = await timed({**stores, **faulty}, expected=len(honest))
                limit = 1.2 * alone + STORE_CLOCK_SECONDS
                row = {"repetition": repetition, "fault": kind, "alone_s": alone, "seconds": seconds, "limit_s": limit}
                rows.append(row)
                print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
            server.faults.clear()
            await network.publish({uid: stores[uid] for uid in FAULTY})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(Path(folder), given.repetitions))
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )
    redraw("gather_faults")
    for kind in KINDS:
        mine = [row for row in rows if row["fault"] == kind]
        print(
            kind,
            *(
                f"{name} {statistics.median(float(str(row[name])) for row in mine):.3f}"
                for name in ("alone_s", "seconds", "limit_s")
            ),
        )


if __name__ == "__main__":
    main()

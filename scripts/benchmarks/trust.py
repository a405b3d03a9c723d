"""Measures a window's votes and decisions: seconds, requests and bytes of each validator, for 1, 5 and 20 of them.

    python scripts/benchmarks/trust.py [--repetitions 5]

Real electors with real signatures over HTTP on the project's S3 server, which answers each request after 50 ms. All
validators have 20 peers' updates at time 0, when the window's updates are either in or out. Delta is that of a
production run. Requests and bytes are counted at the validator that sends them: those of votes, echoes, statuses and
decisions, which are in addition to a window without elections. In the case "first silent", the elector with the most
stake does not take part. Limits with five answering validators: 3 s and 20 requests. Writes docs/benchmarks/trust.csv
and its picture.
"""

import argparse
import asyncio
import csv
import hashlib
import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictures import redraw
from pictures_network import TRUST_REQUESTS, TRUST_SECONDS

from tplr.chain import hotkeys
from tplr.chain.electors import Elector, Electors
from tplr.exchange.ballot_box import BallotBox, record_ballot
from tplr.exchange.ballots import BallotReader, CheckedProof, Vote
from tplr.exchange.election import Election
from tplr.exchange.election_run import ElectionRun
from tplr.exchange.envelope import Run, Signer
from tplr.exchange.quorum import WindowQuestion
from tplr.localnet.accounts import key_table, new_account
from tplr.schemas import PeerList
from tplr.storage import S3Connections
from tplr.storage.s3_store import S3Store
from tplr.testing.s3server import Delay, serve

TABLE = Path(__file__).parents[2] / "docs" / "benchmarks" / "trust.csv"
VALIDATORS, PEERS, REQUEST_SECONDS, DELTA = (1, 5, 20), range(100, 120), 0.05, 2.0
RUN, WINDOW = Run(3, "1"), 7
UNTIL = 60.0
WARM_UP = 0.5  # seconds from the start of all validators to time 0
FOUND = {str(uid): hashlib.sha256(b"%d" % uid).hexdigest() for uid in PEERS}
QUESTION = WindowQuestion(
    window=WINDOW,
    version=RUN.version,
    listed=PeerList(
        peers=tuple(PEERS), reserve_peers=(), initial_selection=False, sync_window=1, first_effective_window=3
    ),
    size=10**6,
    at_most=20,
    effective=WINDOW + 3,
    lists_until=1,
    void_from=20,
)


@dataclass
class Count:
    """Counts of one validator. ``committed``, ``decided``: seconds since time 0."""

    requests: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    committed: float = 0.0
    decided: float = 0.0


class CountedStore(S3Store):
    """A store that counts its gets and puts, including those that fail."""

    count: Count

    @classmethod
    def of(cls, store: S3Store, count: Count) -> "CountedStore":
        made = cls(store.client)
        made.count = count
        return made

    async def get(self, key: str, **options: Any) -> bytes:
        self.count.requests += 1
        body = await super().get(key, **options)
        self.count.read_bytes += len(body)
        return body

    async def put(self, key: str, data: bytes, **options: Any) -> Any:
        self.count.requests += 1
        self.count.written_bytes += len(data)
        return await super().put(key, data, **options)


async def decide(folder: Path, validators: int, *, silent: bool) -> list[Count]:
    """Run one window; return the counts of each validator that takes part."""
    keys = [hotkeys.new_hotkey() for _ in range(validators)]
    electors = Electors(tuple(Elector(uid, key.ss58_address, 200 - uid) for uid, key in enumerate(keys)))
    accounts = [new_account() for _ in keys]
    counts = [Count() for _ in keys]
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(folder / "s3", key_table(accounts)))
        server.faults.add("", Delay(REQUEST_SECONDS), times=None)
        opens = loop.time() + WARM_UP

        async def take_part(uid: int) -> None:
            connections = await stack.enter_async_context(S3Connections(server.endpoint))
            key, count = keys[uid], counts[uid]
            box = BallotBox(
                subject=WINDOW,
                reader=BallotReader(electors, RUN, WINDOW),
                signer=Signer(RUN, uid, key.ss58_address, key.sign),
                own=CountedStore.of(connections.store(accounts[uid].writable), count),
                stores={
                    other: CountedStore.of(connections.store(account.readable), count)
                    for other, account in enumerate(accounts)
                    if other != uid
                },
                folder=folder / str(uid),
                seconds=5.0,
            )
            box.folder.mkdir()
            election = Election(electors, uid, QUESTION, DELTA)
            await asyncio.sleep(opens - loop.time())
            record_ballot(election, await box.vote(Vote(found=FOUND, missing={}, peers=None)))

            async def committed(proof: CheckedProof) -> None:
                if len(proof.value.included.included) != len(PEERS):
                    raise SystemExit(f"{len(proof.value.included.included)} of {len(PEERS)} updates included")
                count.committed = loop.time() - opens

            if not await ElectionRun(election, box, DELTA, opens).finish(until=UNTIL, committed=committed):
                raise SystemExit(f"validator {uid} of {validators} knows no decision after {UNTIL} s")
            count.decided = loop.time() - opens

        present = range(1 if silent else 0, validators)
        await asyncio.gather(*(take_part(uid) for uid in present))
        return [counts[uid] for uid in present]


def row_of(case: str, validators: int, repetition: int, counts: list[Count]) -> dict[str, object]:
    """Return the slowest validator's seconds, and the mean and the largest number of requests and bytes."""
    return {
        "case": case,
        "validators": validators,
        "repetition": repetition,
        "committed_s": max(one.committed for one in counts),
        "decided_s": max(one.decided for one in counts),
        "requests": statistics.fmean(one.requests for one in counts),
        "most_requests": max(one.requests for one in counts),
        "read_kB": statistics.fmean(one.read_bytes for one in counts) / 1000,
        "written_kB": statistics.fmean(one.written_bytes for one in counts) / 1000,
    }


async def measure(repetitions: int) -> list[dict[str, object]]:
    """Measure all cases, one after the other in each repetition."""
    rows = []
    cases = [("all answer", count) for count in VALIDATORS] + [("first silent", count) for count in VALIDATORS[1:]]
    for repetition in range(repetitions):
        for case, validators in cases:
            with tempfile.TemporaryDirectory() as folder:
                counts = await decide(Path(folder), validators, silent=case == "first silent")
            rows.append(row_of(case, validators, repetition, counts))
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()})
    return rows


def main() -> None:
    """Measure, write the table and the picture; status 1 above a limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    rows = asyncio.run(measure(given.repetitions))
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
        )
    redraw("trust")
    five = [row for row in rows if (row["case"], row["validators"]) == ("all answer", 5)]
    seconds = statistics.median(float(str(row["decided_s"])) for row in five)
    requests = max(float(str(row["most_requests"])) for row in five)
    print(f"five validators: {seconds:.2f} s of {TRUST_SECONDS}, {requests:.0f} requests of {TRUST_REQUESTS}")
    if seconds > TRUST_SECONDS or requests > TRUST_REQUESTS:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

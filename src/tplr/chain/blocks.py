"""A chain in one SQLite file: its blocks, created on demand, and the state at each block.

The first reader after a block is due inserts it and runs its calls, in one ``BEGIN IMMEDIATE`` transaction. So any
number of processes can share the file and see the same chain, no process has to keep it running, and each process may
be killed at any moment. All tables are append-only and keyed by block: the state at block N consists of the latest rows
up to N, and never changes.

Hashes are random, so they can't be predicted. Timestamps are in milliseconds, strictly increasing, with skipped slots;
block 0 is 1970. The reported head sometimes steps back. Old state is unavailable. The file must be on a local disk.
"""

import dataclasses
import hashlib
import json
import os
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from tplr.chain import rules
from tplr.chain.base import Block, Commitment, Metagraph, Neuron
from tplr.chain.clocks import Clock, WallClock
from tplr.chain.rules import ChainLimits
from tplr.errors import ChainUnavailable
from tplr.seeds import derive

SCHEMA = """
CREATE TABLE genesis (value TEXT NOT NULL);
CREATE TABLE block (number INTEGER PRIMARY KEY, slot INTEGER NOT NULL, hash TEXT NOT NULL, time_ms INTEGER NOT NULL);
CREATE TABLE limits (id INTEGER PRIMARY KEY, block INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE neuron (id INTEGER PRIMARY KEY, block INTEGER NOT NULL, uid INTEGER NOT NULL, hotkey TEXT, coldkey TEXT);
CREATE TABLE stake (id INTEGER PRIMARY KEY, block INTEGER NOT NULL, hotkey TEXT NOT NULL, amount REAL NOT NULL);
CREATE TABLE permit (id INTEGER PRIMARY KEY, block INTEGER NOT NULL, uid INTEGER NOT NULL, granted INTEGER NOT NULL);
CREATE TABLE incentive (id INTEGER PRIMARY KEY, block INTEGER NOT NULL, uid INTEGER NOT NULL, share REAL NOT NULL);
CREATE TABLE commitment (id INTEGER PRIMARY KEY, block INTEGER NOT NULL, hotkey TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE weights (id INTEGER PRIMARY KEY, block INTEGER NOT NULL, visible INTEGER NOT NULL, hotkey TEXT NOT NULL,
                      row TEXT NOT NULL);
CREATE TABLE call (id INTEGER PRIMARY KEY, hotkey TEXT NOT NULL, kind TEXT NOT NULL, payload TEXT NOT NULL);
CREATE TABLE receipt (call INTEGER PRIMARY KEY, block INTEGER NOT NULL, error TEXT, message TEXT, retry_at INTEGER);
"""
# Seconds that a process waits for another process's transaction.
BUSY_TIMEOUT = 30.0
# A chain that is not read for longer than this pauses: creating this many blocks takes some seconds.
MAX_CATCH_UP_SLOTS = 100_000


@dataclass(frozen=True, kw_only=True)
class Genesis:
    """Constants of a chain, fixed at its creation.

    Attributes:
        block_time: seconds per slot.
        skipped_slots: fraction of slots without a block, chosen by ``seed``.
        stale_heads: fraction of reads of the head that return the block before it, chosen by ``seed``.
        finality_lag: blocks between the head and the newest final block.
        retained_blocks: age in blocks of the oldest available state, except for archives; None keeps all.
    """

    netuid: int = 1
    block_time: float = 12.0
    start_ms: int
    skipped_slots: float = 0.02
    seed: int = 0
    finality_lag: int = 2
    retained_blocks: int | None = 256
    stale_heads: float = 0.02

    def __post_init__(self) -> None:
        if not (0 <= self.skipped_slots < 1 and 0 <= self.stale_heads < 1 and self.block_time > 0):
            raise ValueError(f"expected skipped_slots and stale_heads in [0, 1) and block_time > 0, got {self}")


class Head(NamedTuple):
    """The newest block, with its slot and time."""

    number: int
    slot: int
    hash: str
    time_ms: int


class _Seat(NamedTuple):
    """The holder of a uid, since the block of its registration."""

    hotkey: str
    coldkey: str
    since: int


class BlockFile(ABC):
    """An open chain file. Synchronous, safe to use from threads.

    Raises:
        ChainUnavailable: from any method: there is no such file, it is not a chain, or another process holds it for too
            long.
    """

    def __init__(self, path: str | Path, *, clock: Clock | None = None, archive: bool = False) -> None:
        self.path = Path(path)
        self._clock = clock or WallClock()
        self._archive = archive
        self._lock = threading.RLock()
        if not self.path.is_file():
            raise ChainUnavailable(f"no chain file at {self.path}: `tplr localnet` makes one, or Ledger.create")
        self._db = sqlite3.connect(
            f"file:{quote(str(self.path))}?mode=rw",
            uri=True,
            timeout=BUSY_TIMEOUT,
            isolation_level=None,
            check_same_thread=False,
        )
        with self._session():
            (value,) = self._db.execute("SELECT value FROM genesis").fetchone()
            (self.genesis_hash,) = self._db.execute("SELECT hash FROM block WHERE number = 0").fetchone()
        self.genesis = Genesis(**{"stale_heads": 0.0} | json.loads(value))  # older files lack it

    @staticmethod
    def create(
        path: str | Path, *, limits: ChainLimits | None = None, clock: Clock | None = None, **constants: Any
    ) -> None:
        """Create a chain file with block 0; its first slot begins now. The file appears complete or not at all.

        Args:
            constants: fields of ``Genesis``.

        Raises:
            FileExistsError: there is a file at ``path``.
            ValueError: a constant is out of its range.
        """
        genesis = Genesis(start_ms=_milliseconds(clock or WallClock()), **constants)
        path = Path(path)
        draft = path.with_name(f"{path.name}.{os.getpid()}.new")
        draft.unlink(missing_ok=True)
        db = sqlite3.connect(draft, isolation_level=None)
        try:
            # WAL is stored in the file; with it, readers and the one writer do not block each other.
            db.execute("PRAGMA journal_mode=WAL")
            db.executescript(SCHEMA)
            db.execute("INSERT INTO genesis VALUES (?)", [json.dumps(dataclasses.asdict(genesis))])
            db.execute("INSERT INTO block VALUES (0, 0, ?, 0)", [_new_hash("")])
            db.execute("INSERT INTO limits VALUES (1, 0, ?)", [json.dumps(dataclasses.asdict(limits or ChainLimits()))])
        finally:
            db.close()
        try:
            # Unlike a rename, a link never replaces a chain that another process has just created.
            os.link(draft, path)
        finally:
            draft.unlink()

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._db.close()

    # Time

    def look(self) -> tuple[int, float]:
        """Create due blocks; return the number of the newest, and when the next is due (Unix seconds)."""
        with self._session():
            head = self._advance()
            return head.number, self._next(head).time_ms / 1000

    def _advance(self) -> Head:
        head = self._head()
        if self._next(head).time_ms > _milliseconds(self._clock):
            return head
        with self._transaction():
            return self._make_due_blocks()

    def _make_due_blocks(self) -> Head:
        """Create due blocks; call it in a transaction, so that another process's blocks are taken into account."""
        now = _milliseconds(self._clock)
        head = self._head()
        idle_slots = int((now - self.genesis.start_ms) / (self.genesis.block_time * 1000)) - head.slot
        if idle_slots > MAX_CATCH_UP_SLOTS:
            head = head._replace(slot=head.slot + idle_slots - MAX_CATCH_UP_SLOTS)
        while (following := self._next(head)).time_ms <= now:
            self._db.execute("INSERT INTO block VALUES (?, ?, ?, ?)", following)
            self._enact(following.number)
            head = following
        return head

    @abstractmethod
    def _enact(self, block: int) -> None:
        """Apply all effects of a new block."""

    def _head(self) -> Head:
        return Head(*self._db.execute("SELECT * FROM block ORDER BY number DESC LIMIT 1").fetchone())

    def _next(self, head: Head) -> Head:
        """Return the block after ``head``; all its fields except the hash are known in advance."""
        genesis = self.genesis
        slot = head.slot + 1
        while derive("skipped-slot", genesis.seed, slot) / 2**64 < genesis.skipped_slots:
            slot += 1
        slot_ms = genesis.block_time * 1000
        # A block is delayed after the start of its slot, by up to a twentieth of a slot.
        moment = derive("author", genesis.seed, slot) % max(1, int(slot_ms / 20))
        return Head(head.number + 1, slot, _new_hash(head.hash), genesis.start_ms + round(slot * slot_ms) + moment)

    # State

    def block(self, number: int) -> Block:
        with self._session():
            head = self._advance().number
            self._check_available(number, head)
            if number > max(0, head - self.genesis.finality_lag):
                raise ChainUnavailable(f"block {number} is not final yet; the head is {head}", name="NotFinal")
            row = self._db.execute("SELECT hash, time_ms FROM block WHERE number = ?", [number]).fetchone()
        return Block(number, row[0], row[1] / 1000)

    def metagraph(self, block: int | None = None) -> Metagraph:
        with self._session():
            return self._metagraph(self._state_block(block))

    def commitments(self, block: int | None = None) -> dict[str, Commitment]:
        with self._session():
            rows = self._latest("commitment", "hotkey", "hotkey, block, data", self._state_block(block))
        return {hotkey: Commitment(hotkey, number, data) for hotkey, number, data in rows}

    def weights(self, block: int | None = None) -> dict[int, dict[int, float]]:
        with self._session():
            at = self._state_block(block)
            return self._weights(self._metagraph(at))

    def limits(self, block: int | None = None) -> ChainLimits:
        with self._session():
            return self._limits(self._state_block(block))

    def _state_block(self, block: int | None) -> int:
        head = self._advance().number
        if block is None:
            return head
        self._check_available(block, head)
        return block

    def _check_available(self, block: int, head: int) -> None:
        if not 0 <= block <= head:
            raise ChainUnavailable(f"there is no block {block}; the head is {head}", name="UnknownBlock")
        retained = self.genesis.retained_blocks
        if retained is not None and not self._archive and block < head - retained:
            raise ChainUnavailable(
                f"the state of block {block} is dropped, {head - block} blocks behind the head: "
                "ask a node that keeps it (--subtensor.archive)",
                name="StateDiscarded",
            )

    def _latest(self, table: str, key: str, columns: str, block: int) -> list[tuple]:
        """Read the newest row of each key up to ``block``. SQLite takes bare columns from the row of the MAX."""
        sql = f"SELECT {columns}, MAX(id) FROM {table} WHERE block <= ? GROUP BY {key} ORDER BY {key}"  # noqa: S608
        return [row[:-1] for row in self._db.execute(sql, [block])]

    def _metagraph(self, block: int) -> Metagraph:
        stakes: dict[str, float] = dict(self._latest("stake", "hotkey", "hotkey, amount", block))
        permits: dict[int, int] = dict(self._latest("permit", "uid", "uid, granted", block))
        shares: dict[int, float] = dict(self._latest("incentive", "uid", "uid, share", block))
        updates: dict[str, int] = dict(self._latest("weights", "hotkey", "hotkey, block", block))
        return Metagraph(
            block,
            tuple(
                Neuron(
                    uid=uid,
                    hotkey=seat.hotkey,
                    coldkey=seat.coldkey,
                    stake=stakes.get(seat.hotkey, 0.0),
                    permit=bool(permits.get(uid, False)),
                    last_update=max(seat.since, updates.get(seat.hotkey, 0)),
                    incentive=shares.get(uid, 0.0),
                )
                for uid, seat in self._seats(block).items()
            ),
        )

    def _seats(self, block: int) -> dict[int, _Seat]:
        """Return the holder of each uid."""
        rows = self._latest("neuron", "uid", "uid, hotkey, coldkey, block", block)
        return {uid: _Seat(hotkey, coldkey, since) for uid, hotkey, coldkey, since in rows if hotkey is not None}

    def _weights(self, metagraph: Metagraph) -> dict[int, dict[int, float]]:
        seats = self._seats(metagraph.block)
        uids = {seat.hotkey: uid for uid, seat in seats.items()}
        rows = self._db.execute(
            "SELECT hotkey, block, row FROM weights WHERE visible <= ? ORDER BY visible, id", [metagraph.block]
        )
        in_force: dict[int, dict[int, float]] = {}
        for hotkey, block, row in rows:
            uid = uids.get(hotkey)
            # A neuron that was replaced and registered again starts without weights.
            if uid is not None and block >= seats[uid].since:
                in_force[uid] = rules.fractions(json.loads(row))
        return dict(sorted(in_force.items()))

    def _limits(self, block: int) -> ChainLimits:
        sql = "SELECT value FROM limits WHERE block <= ? ORDER BY id DESC LIMIT 1"
        (value,) = self._db.execute(sql, [block]).fetchone()
        return ChainLimits(**json.loads(value))

    # The file

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Lock this connection for one thread; translate SQLite's errors, such as "busy" and "disk full"."""
        with self._lock:
            try:
                yield
            except sqlite3.DatabaseError as error:  # a file of another kind is one that is not an OperationalError
                raise ChainUnavailable(f"chain file {self.path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run a transaction; only one at a time among all processes."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.OperationalError):
                self._db.execute("ROLLBACK")
            raise


def _milliseconds(clock: Clock) -> int:
    return round(clock.now() * 1000)


def _new_hash(parent: str) -> str:
    return "0x" + hashlib.sha256(parent.encode() + os.urandom(32)).hexdigest()

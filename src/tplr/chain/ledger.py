"""Calls, epochs and administrator's changes in the blocks of a chain file, by ``rules.py``.

Calls wait in a pool. The next block runs them, even if their caller has ended by then. Signatures, fees and forks are
not simulated.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from tplr.chain import rules
from tplr.chain.blocks import BlockFile
from tplr.chain.rules import ChainLimits
from tplr.errors import ChainError

Kind = Literal["commit", "weights"]


class Receipt(NamedTuple):
    """A call was included in ``block``; ``error`` is None if it took effect."""

    block: int
    error: ChainError | None


class Ledger(BlockFile):
    """An open chain file: reads, calls and administrator's changes. Synchronous, thread-safe.

    Administrator's changes take effect in the next block, as calls do.
    """

    # Calls

    def submit(self, hotkey: str, kind: Kind, payload: str | Sequence[tuple[int, int]]) -> int:
        """Put a call into the pool and return its number; the next block runs it even if this process ends.

        Raises:
            ChainError: the pool refuses it.
        """
        with self._session(), self._transaction():
            head = self._make_due_blocks().number
            if kind == "weights":
                neuron = self._metagraph(head).by_hotkey().get(hotkey)
                rules.check_weights_at_pool(neuron, limits=self._limits(head), block=head)
            sql = "INSERT INTO call (hotkey, kind, payload) VALUES (?, ?, ?)"
            number = self._db.execute(sql, [hotkey, kind, json.dumps(payload)]).lastrowid
        assert number is not None
        return number

    def receipt(self, call: int) -> Receipt | None:
        """Return the receipt of a call, or None while it waits in the pool."""
        with self._session():
            self._advance()
            sql = "SELECT block, error, message, retry_at FROM receipt WHERE call = ?"
            row = self._db.execute(sql, [call]).fetchone()
        if row is None:
            return None
        block, error, message, retry_at = row
        return Receipt(block, rules.refusal(error, message, retry_at=retry_at) if error else None)

    def _enact(self, block: int) -> None:
        """Run a new block: an epoch if one starts, then the calls in their order."""
        limits = self._limits(block)
        epoch = rules.epoch_of(block, limits, self.genesis.netuid)
        if block == rules.epoch_start(epoch, limits, self.genesis.netuid):
            self._run_epoch(block, limits)
        # Calls run in the order of their numbers, so all up to the last receipt are done.
        pool = "SELECT id, hotkey, kind, payload FROM call WHERE id > (SELECT IFNULL(MAX(call), 0) FROM receipt)"
        for call, hotkey, kind, payload in self._db.execute(f"{pool} ORDER BY id").fetchall():
            name = message = retry_at = None
            try:
                run = {"commit": self._run_commit, "weights": self._run_weights}[kind]
                run(block, hotkey, json.loads(payload), limits)
            except ChainError as error:
                name, message = error.name, str(error).removeprefix(f"{error.name}: ")
                retry_at = getattr(error, "retry_at", None)
            self._db.execute("INSERT INTO receipt VALUES (?, ?, ?, ?, ?)", [call, block, name, message, retry_at])

    def _run_commit(self, block: int, hotkey: str, text: str, limits: ChainLimits) -> None:
        epoch = rules.epoch_of(block, limits, self.genesis.netuid)
        start = rules.epoch_start(epoch, limits, self.genesis.netuid)
        sql = "SELECT data FROM commitment WHERE hotkey = ? AND block >= ?"
        rules.check_commitment(
            text.encode(),
            registered=any(seat.hotkey == hotkey for seat in self._seats(block).values()),
            used=sum(rules.commitment_charge(data.encode()) for (data,) in self._db.execute(sql, [hotkey, start])),
            limits=limits,
            block=block,
            netuid=self.genesis.netuid,
        )
        self._insert("commitment", block, hotkey=hotkey, data=text)

    def _run_weights(self, block: int, hotkey: str, row: list[tuple[int, int]], limits: ChainLimits) -> None:
        sql = "SELECT COUNT(*) FROM weights WHERE hotkey = ? AND visible > ?"
        (unrevealed,) = self._db.execute(sql, [hotkey, block]).fetchone()
        metagraph = self._metagraph(block)
        pairs = [(uid, value) for uid, value in row]
        rules.check_weights(pairs, hotkey=hotkey, metagraph=metagraph, limits=limits, unrevealed=unrevealed)
        visible = block
        if limits.commit_reveal:
            epoch = rules.epoch_of(block, limits, self.genesis.netuid)
            visible = rules.epoch_start(epoch + limits.reveal_epochs, limits, self.genesis.netuid)
        self._insert("weights", block, visible=visible, hotkey=hotkey, row=json.dumps(row))

    def _run_epoch(self, block: int, limits: ChainLimits) -> None:
        before = self._metagraph(block)
        permitted = rules.permitted(before.neurons, limits)
        shares = rules.incentives(before, self._weights(before))
        for neuron in before.neurons:
            if neuron.permit != (neuron.uid in permitted):
                self._insert("permit", block, uid=neuron.uid, granted=int(neuron.uid in permitted))
            if neuron.incentive != shares[neuron.uid]:
                self._insert("incentive", block, uid=neuron.uid, share=shares[neuron.uid])

    # The administrator

    def register(self, hotkey: str, coldkey: str = "", *, stake: float | None = None, permit: bool = False) -> int:
        """Give ``hotkey`` a uid, possibly a replaced neuron's (``rules.uid_for_newcomer``), and return it.

        Its stake changes only if ``stake`` is given. A permit lasts until the next epoch.

        Raises:
            Rejected: the hotkey is registered already.
        """
        with self._change() as block:
            metagraph, seats = self._metagraph(block), self._seats(block)
            if metagraph.uid_of(hotkey) is not None:
                raise rules.refusal("HotKeyAlreadyRegisteredInSubNet", f"{hotkey} has uid {metagraph.uid_of(hotkey)}")
            registered_at = {uid: since for uid, (_, _, since) in seats.items()}
            uid = rules.uid_for_newcomer(metagraph.neurons, registered_at, limits=self._limits(block), block=block)
            self._insert("neuron", block, uid=uid, hotkey=hotkey, coldkey=coldkey)
            self._insert("permit", block, uid=uid, granted=int(permit))
            self._insert("incentive", block, uid=uid, share=0.0)
            if stake is not None:
                self._insert("stake", block, hotkey=hotkey, amount=stake)
        return uid

    def deregister(self, hotkey: str) -> int:
        """Free the uid of ``hotkey`` and return it. (A real subnet only replaces neurons.)"""
        with self._change() as block:
            uid = self._uid_of(hotkey, block)
            self._insert("neuron", block, uid=uid, hotkey=None, coldkey=None)
        return uid

    def set_stake(self, hotkey: str, amount: float) -> None:
        """Set the stake of a hotkey, registered or not, in alpha. Permits change at the next epoch."""
        with self._change() as block:
            self._insert("stake", block, hotkey=hotkey, amount=amount)

    def set_permit(self, hotkey: str, granted: bool = True) -> None:
        """Set a permit until the next epoch."""
        with self._change() as block:
            self._insert("permit", block, uid=self._uid_of(hotkey, block), granted=int(granted))

    def set_limits(self, **changes: float) -> None:
        """Change some of ``rules.ChainLimits``."""
        with self._change() as block:
            value = dataclasses.replace(self._limits(block), **changes)  # type: ignore[arg-type]
            self._insert("limits", block, value=json.dumps(dataclasses.asdict(value)))

    def _uid_of(self, hotkey: str, block: int) -> int:
        uid = self._metagraph(block).uid_of(hotkey)
        if uid is None:
            raise rules.refusal("HotKeyNotRegisteredInSubNet", f"{hotkey} has no uid")
        return uid

    def _insert(self, table: str, block: int, **values: object) -> None:
        """Add a row that is valid from ``block`` on."""
        columns, marks = ", ".join(["block", *values]), ", ".join("?" * (1 + len(values)))
        self._db.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", [block, *values.values()])  # noqa: S608

    @contextmanager
    def _change(self) -> Iterator[int]:
        """Run a transaction of the administrator; yields the next block, in which it takes effect."""
        with self._session(), self._transaction():
            yield self._make_due_blocks().number + 1

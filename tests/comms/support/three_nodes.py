"""Three nodes with their buckets on one server and one chain."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bittensor_core import Keypair

from tplr.chain.clocks import ManualClock
from tplr.chain.ledger import Ledger
from tplr.comms import Comms
from tplr.localnet.accounts import Account
from tplr.testing.s3server import Server

NAMES = ("leader", "alice", "bob")
HOTKEYS = {name: Keypair.create_from_uri(f"//{name}") for name in (*NAMES, "evil")}
LEADER, ALICE, BOB, EVIL = range(4)
STATE = {"widxs": torch.tensor([[1, 5]]), "wvals": torch.tensor([[0.5, -0.5]]), "metadata": {"pages": [1, 2]}}
W = 10  # a window
WAIT = 3.0  # seconds until a gather gives up an invalid object that may still be replaced


class World:
    """One ``Comms`` for each of ``NAMES``, in virtual time of chain and storage; uid 3 committed to no bucket."""

    clock: ManualClock
    chain: Path
    server: Server
    nodes: list[Comms]
    accounts: list[Account]
    common: Account

    def __getitem__(self, uid: int) -> Comms:
        return self.nodes[uid]

    async def move_lead(self, *, to: str) -> None:
        """Give ``to`` a permit and more stake than any other node."""
        admin = Ledger(self.chain, clock=self.clock)
        admin.set_stake(to, 1e9)
        admin.set_permit(to, True)
        admin.close()
        self.clock.advance(30)

    async def pass_window(self) -> None:
        """Let window ``W`` pass; the nodes see it."""
        leader = self[LEADER]
        self.clock.advance((W + 2) * leader.blocks_per_window * leader.chain.block_time)
        for comms in self.nodes:
            following = asyncio.create_task(comms.clock.run())
            await self.clock.drive(comms.clock.wait_for_window(W + 1), step=0.0)
            following.cancel()

    async def keys(self, uid: int) -> list[str]:
        return [info.key for info in await self.nodes[uid].own_store.list()]


def most_at_once(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, counts: Callable[..., bool]) -> list[int]:
    """Record the number of running calls of ``method`` at the beginning of each call for which ``counts`` is true."""
    running: list[int] = [0]
    real = getattr(owner, method)

    async def counted(self: object, *args: object, **options: object) -> object:
        now = running[0] = running[0] + counts(*args, **options)
        seen.append(now)
        try:
            return await real(self, *args, **options)
        finally:
            running[0] -= counts(*args, **options)

    seen: list[int] = []
    monkeypatch.setattr(owner, method, counted)
    return seen

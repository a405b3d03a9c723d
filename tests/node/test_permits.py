"""The start of a run in which all nodes have a permit: a minority of permit holders has no effect, silent or not.

Chain file, storage, buckets and leaders are real: three validators, and two miners that also have a permit.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tplr.chain.ledger import Ledger
from tplr.errors import PreconditionFailed
from tplr.exchange.ballots import Commitment, Decision, Echo, value_id
from tplr.exchange.envelope import WHOLE_RUN, sign_document
from tplr.exchange.quorum import void
from tplr.keys import decision_key
from tplr.localnet.plan import BLOCK_SECONDS
from tplr.node.leader import Leader, start_window
from tplr.node.replica import NodeContext
from tplr.node.start_election import SLOTS, decided_before
from tplr.schemas import PeerList
from tplr.testing.s3server import Delay, Status

VALIDATORS = ("validator", "validator-2", "validator-3")
MINERS = ("miner-1", "miner-2")
TOGETHER = (*VALIDATORS, *MINERS)


class Start:
    """Nodes that wait for the run's start, any number of times."""

    def __init__(self, stage: Any, contexts: dict[str, NodeContext]) -> None:
        self.stage = stage
        self.contexts = contexts

    def comms(self, name: str) -> Any:
        return self.contexts[name].comms

    async def windows(self, *names: str) -> dict[str, int]:
        """Return the start window that each node finds, all at the same time; TimeoutError if one finds none."""
        horizon = self.stage.hparams.start_horizon_windows
        waiting = [
            Leader(self.contexts[name], self.stage.hparams, self.stage.folder(name) / "start").start_window()
            if name in VALIDATORS
            else start_window(self.contexts[name], horizon)
            for name in names
        ]
        async with self.stage.running(*(context.clock.run() for context in self.contexts.values())):
            await asyncio.gather(*(context.clock.wait_for_window(0) for context in self.contexts.values()))
            found = await asyncio.wait_for(asyncio.gather(*waiting), 90)
        return dict(zip(names, found, strict=True))

    async def publishes(self, name: str, ahead: int) -> int:
        """Publish a well-formed start window this far ahead of the chain's head, in this node's bucket, with its own
        key."""
        comms = self.comms(name)
        window = comms.block_to_window(await comms.chain.head()) + ahead
        with contextlib.suppress(PreconditionFailed):
            await comms.post_start_window(window)
        return window


# One attempt in each window, which is longer than a slot.
CONSTANTS = {"relay_seconds": 0.8, "manifest_timeout_seconds": 1.0}


@pytest.fixture
async def start(staged: Any) -> AsyncIterator[Start]:
    async with staged(2, validators=3, **CONSTANTS) as stage:
        admin = Ledger(stage.network.chain)
        for name in MINERS:
            admin.set_permit(stage.setup(name).address, True)
        admin.close()
        await asyncio.sleep(2 * BLOCK_SECONDS)
        contexts = {name: await stage.context(stage.setup(name)) for name in TOGETHER}
        for context in contexts.values():
            await context.comms.refresh()
        assert all(one.permit for one in contexts["validator"].comms.metagraph.neurons)
        yield Start(stage, contexts)


async def test_a_start_window_by_a_minority_is_nobodys(start: Start) -> None:
    false = await start.publishes("miner-2", 50)
    (window,) = set((await start.windows(*TOGETHER)).values())
    assert window != false
    listed = await start.comms("miner-1").get_peer_list(window)
    assert {*listed.peers, *listed.probation} >= {start.comms(name).uid for name in MINERS}
    # Again, all from published documents.
    assert set((await start.windows(*TOGETHER)).values()) == {window}


async def test_a_start_window_by_the_largest_validator_alone_is_nobodys(start: Start) -> None:
    """It has two fifths of the stake; the others agree on another one without it."""
    false = await start.publishes("validator", 50)
    found = await start.windows("validator-2", "validator-3", *MINERS)
    assert len(set(found.values())) == 1
    assert false not in found.values()


async def test_a_closed_bucket_stops_nobody_and_who_takes_the_lead_later_continues_the_run(start: Start) -> None:
    bucket = start.stage.setup("validator").account.name
    start.stage.server.faults.add(f"^(GET|HEAD) /{bucket}[/?]", Status(403, "AccessDenied"), times=None)
    (window,) = set((await start.windows("validator-2", "validator-3", *MINERS)).values())
    start.stage.server.faults.clear()
    assert await start.windows("validator") == {"validator": window}


async def test_who_was_alone_starts_the_run_for_those_who_come_meanwhile(staged: Any) -> None:
    """They have a bucket one window after the window in which it is alone, and do not decide on another start."""
    async with staged(2, validators=3, **CONSTANTS) as stage:
        contexts = {name: await stage.context(stage.setup(name)) for name in ("validator-2", *MINERS)}
        alone = contexts["validator-2"]
        async with stage.running(alone.clock.run()):
            first = await alone.clock.wait_for_window(0)
            await alone.clock.wait_for_window(first + 2)
            contexts |= {name: await stage.context(stage.setup(name)) for name in ("validator", "validator-3")}
        for context in contexts.values():
            await context.comms.refresh()
        assert len(alone.comms.electors.uids) == 3
        found = await Start(stage, contexts).windows(*contexts)
        assert len(set(found.values())) == 1
        lists = [await contexts[name].comms.get_peer_list(found[name]) for name in VALIDATORS]
        assert lists[0] == lists[1] == lists[2]


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_a_bucket_that_hangs_stops_nobody(start: Start) -> None:
    bucket = start.stage.setup("validator").account.name
    start.stage.server.faults.add(f"^(GET|HEAD) /{bucket}[/?]", Delay(3600), times=None)
    found = await start.windows("validator-2", "validator-3", *MINERS)
    assert len(set(found.values())) == 1


class _Alone:
    """Manual time: ``validator-3`` was the only elector in one window, and has less than half of the stake now."""

    def __init__(self, stage: Any, contexts: dict[str, NodeContext], slot: int) -> None:
        self.stage = stage
        self.contexts = contexts
        self.slot = slot

    async def publishes(self, peers: PeerList) -> None:
        """Publish, in its bucket, a start that it signs as decided in the window in which it was alone."""
        comms = self.contexts["validator-3"].comms
        value = void(0, self.stage.hparams.version).model_copy(update={"peers": peers})
        said = Echo(slot=self.slot, value=value_id(value)), Commitment(value=value_id(value))
        echo, commitment = (sign_document(one, window=WHOLE_RUN, signer=comms.signer).decode() for one in said)
        decision = Decision(slot=self.slot, value=value, votes=(), echoes=(echo,), commitments=(commitment,))
        raw = sign_document(decision, window=WHOLE_RUN, signer=comms.signer)
        await comms.own_store.put(decision_key(None, self.stage.hparams.version), raw)

    def peers(self, *, start: int) -> PeerList:
        """Return a first list as it follows from this slot, but for its start."""
        window = {"sync_window": self.slot, "first_effective_window": start}
        return PeerList(peers=(0,), initial_selection=True, **window)

    async def found(self) -> PeerList | None:
        """Return the start that ``validator`` takes as decided before."""
        return await decided_before(self.contexts["validator"], self.stage.hparams)


@pytest.fixture
async def alone(staged: Any) -> AsyncIterator[_Alone]:
    async with staged(1, validators=3, by_hand=True, dated_by_hand=True, **CONSTANTS) as stage:
        contexts = {"validator-3": await stage.context(stage.setup("validator-3"))}
        clock = contexts["validator-3"].clock
        async with stage.running(clock.run()):
            slot = await stage.drive(clock.wait_for_window(0)) + 2
            await stage.pass_windows(2, clock)
            contexts |= {name: await stage.context(stage.setup(name)) for name in ("validator", "validator-2")}
            for context in contexts.values():
                await stage.drive(context.comms.refresh())
            async with stage.running(*(contexts[name].clock.run() for name in ("validator", "validator-2"))):
                await stage.drive(contexts["validator"].clock.wait_for_window(slot))
                yield _Alone(stage, contexts, slot)


async def test_a_start_decided_alone_is_followed_only_if_it_follows_from_its_slot(alone: _Alone) -> None:
    """Who was the only elector can't name a start so far ahead that the run never begins."""
    margin = alone.stage.hparams.peer_list_window_margin
    honest = alone.peers(start=alone.slot + margin)
    await alone.publishes(honest)
    assert await alone.found() == honest
    await alone.publishes(alone.peers(start=2**40))
    assert await alone.found() is None


async def test_a_start_written_long_after_its_slot_is_nobodys(alone: _Alone) -> None:
    """Who was the only elector once can't decide later that a run began then."""
    honest = alone.peers(start=alone.slot + alone.stage.hparams.peer_list_window_margin)
    await alone.publishes(honest)
    await alone.stage.pass_windows(SLOTS + 2, alone.contexts["validator"].clock)
    assert await alone.found() == honest
    await alone.publishes(honest)
    assert await alone.found() is None

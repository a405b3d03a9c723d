"""Decisions of electors after some were absent: peer lists published late, and windows that no node can follow.

Three voting electors with real keys, buckets and chain; the tests advance the time between windows.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest
import torch

from tplr.clock import first_block
from tplr.compress.payload import Update
from tplr.errors import StoreError, WindowLost
from tplr.exchange.agreed import DecisionReader
from tplr.exchange.ballots import VOID_WITHIN, BallotReader, Value
from tplr.exchange.gather import GatherResult
from tplr.exchange.peers import published_lists, read_list
from tplr.keys import gradient_key, state_key
from tplr.localnet.plan import BLOCK_SECONDS
from tplr.node import elector as electors
from tplr.node import windows
from tplr.node.agreement import Agreement, Divergence
from tplr.node.elector import LAST_WINDOWS, Elector
from tplr.node.failpoints import hook
from tplr.node.leader import Leader
from tplr.node.replica import NodeContext
from tplr.node.windows import WindowUpdates
from tplr.schemas import DebugReport, PeerList
from tplr.testing.s3server import Status
from tplr.training.model import build_model
from tplr.training.schemes import outer_scheme

VALIDATORS, MINERS = ("validator", "validator-2", "validator-3"), ("miner-1", "miner-2")
MARGIN, BOUND, CLOSES_AFTER = 1, 6, 9.0


class Council:
    """Three electors that a test starts and ends, a miner on the peer list, and a miner that is not listed."""

    def __init__(self, stage: Any, contexts: dict[str, NodeContext]) -> None:
        self.stage = stage
        self.contexts = contexts
        self.start = -1
        self.leaders: dict[str, Leader] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        model = build_model(stage.hparams)
        self._tensors = dict(model.named_parameters())
        self._sender = outer_scheme(self._tensors, stage.hparams)
        self.windows = WindowUpdates(self.reader, stage.hparams, self._sender.spec)

    @property
    def reader(self) -> Any:
        """A node without a vote."""
        return self.contexts["miner-2"].comms

    @property
    def window(self) -> int:
        return self.contexts["validator"].clock.window

    def begin(self, *names: str) -> None:
        for name in names:
            context, folder = self.contexts[name], self.stage.folder(name) / "elector"
            self.leaders[name] = Leader(context, self.stage.hparams, folder)
            elector = Elector(context, self.stage.hparams, self._sender.spec, folder, leader=self.leaders[name])
            self._running[name] = asyncio.ensure_future(elector.run(self.start))

    async def end(self, *names: str) -> None:
        for name in names:
            self._running[name].cancel()
        await asyncio.gather(*(self._running.pop(name) for name in names), return_exceptions=True)

    async def lose(self, *names: str) -> None:
        """Kill these electors, and delete their disks."""
        await self.end(*names)
        for name in names:
            shutil.rmtree(self.stage.folder(name) / "elector")

    async def next_window(self, *, before_bound: bool = False) -> None:
        goal = self.window + 1
        # Until its first block is final; without ``before_bound`` also until the last window's updates are in or too
        # late.
        passed = electors.FINAL_BLOCKS if before_bound else round(CLOSES_AFTER / BLOCK_SECONDS)
        await self._pass(first_block(goal, self.stage.hparams.blocks_per_window) + passed)
        assert self.window == goal

    async def pass_bound(self) -> None:
        """Let time pass until updates of the last window are in or too late."""
        await self._pass(first_block(self.window, self.stage.hparams.blocks_per_window) + 20)

    async def _pass(self, block: int) -> None:
        """Let time pass until all nodes have seen a block."""
        while (head := await self.reader.chain.head()) < block:
            self.stage.clock.advance((block - head) * BLOCK_SECONDS)
        for one in self.contexts.values():
            await one.clock.wait_for_block(block)

    async def upload(self, window: int) -> None:
        """Upload an update of a window that has just ended."""
        comms = self.contexts["miner-1"].comms
        tensors = {name: torch.randn(one.shape) for name, one in self._tensors.items()}
        body = self._sender.pack(tensors, step=0, window=window, uid=comms.uid, pages_digest="0" * 64, batches=1)
        await comms.put_update(window, body)

    async def decided(self, window: int, *readers: str) -> Value:
        """Return the decision that all ``readers`` find."""
        values = [
            await eventually(lambda name=name: self.contexts[name].comms.get_decision(window))
            for name in readers or VALIDATORS
        ]
        assert values.count(values[0]) == len(values)
        return values[0]

    async def over(self, window: int, *names: str) -> None:
        """Wait until these electors have ended the window's election: one of them shows more than half of the
        commitments. The others may show only their own: each ends when it has seen its commitment in a decision with
        that many.
        """
        folders = [self.stage.folder(name) / "elector" / f"election-{window}" for name in names]
        await self.stage.until(lambda: not any(folder.exists() for folder in folders))

    async def shows(self, name: str, window: int) -> bool:
        """Return whether the bucket of this elector alone shows the decision."""
        comms = self.contexts[name].comms
        ballots = BallotReader(await comms.electors_in(window), comms.signer.run, window)
        alone = DecisionReader(ballots, lambda uid: comms.own_store if uid == comms.uid else None, window)
        return await alone.look() is not None

    async def tried(self, window: int, times: int) -> None:
        """Wait until each elector has failed this often to read the decision: windows last minutes, attempts
        seconds."""

        def failures(name: str) -> int:
            texts = [event.get("text", "") for event in self.stage.events if event["node"] == name]
            return sum(text.startswith(f"window {window} not decided yet") for text in texts)

        await self.stage.until(lambda: all(failures(name) >= times for name in VALIDATORS))

    async def lists(self, name: str) -> dict[int, PeerList]:
        """Return the published lists of a validator, by first effective window."""
        comms = self.contexts[name].comms
        firsts = await published_lists(comms.own_store, comms.signer)
        return {first: await read_list(comms.own_store, first, comms.signer) for first in firsts}

    async def hidden(self, window: int) -> None:
        """No node has the window's update during the block: no miner, no elector."""
        version, uid = self.stage.hparams.version, self.contexts["miner-1"].comms.uid
        for name in (*VALIDATORS, "miner-1"):
            for key in (gradient_key(window, uid, version), state_key("aggregator", window, 0, version)):
                await self.contexts[name].comms.own_store.delete(key)


async def eventually(read: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(30):
        while True:
            if found := await read():
                return found
            await asyncio.sleep(0.02)


@pytest.fixture
async def council(staged: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Council]:
    monkeypatch.setattr(electors, "closes_after", lambda *_: CLOSES_AFTER + 0.3)
    monkeypatch.setattr(windows, "MAX_RETRY_SECONDS", 0.2)
    constants = {
        "blocks_per_window": 120,
        "time_window_delta_seconds": BOUND,
        "manifest_timeout_seconds": 1.0,
        "relay_seconds": 0.8,
        "require_commit": False,
        "gather_patience_seconds": 0,
        "peer_list_window_margin": MARGIN,
    }
    async with staged(len(MINERS), validators=3, by_hand=True, dated_by_hand=True, **constants) as stage:
        contexts = {name: await stage.context(stage.setup(name)) for name in (*VALIDATORS, *MINERS)}
        async with stage.running(*(one.clock.run() for one in contexts.values())):
            for one in contexts.values():
                await one.clock.wait_for_block(1)
                await one.comms.refresh()
            made = Council(stage, contexts)
            await made.next_window()  # in the first one no node was registered
            made.start = made.window
            uids = (contexts["miner-1"].comms.uid,)
            listed = PeerList(
                peers=uids, initial_selection=True, sync_window=made.start, first_effective_window=made.start
            )
            for name in VALIDATORS:
                await contexts[name].comms.post_peer_list(listed)
            yield made
            await made.end(*made._running)


async def test_who_was_away_publishes_the_lists_that_were_decided_meanwhile(council: Council) -> None:
    here, away = VALIDATORS[:2], VALIDATORS[2]
    council.begin(*here)
    wish = (await council.reader.get_peer_list()).model_copy(
        update={"peers": (council.reader.uid,), "initial_selection": False}
    )
    for name in here:
        council.leaders[name].wish = wish
    window = council.window
    await council.next_window()
    listed = (await council.decided(window, *here)).peers
    assert listed
    assert listed.peers == wish.peers
    await eventually(lambda: published_by(council, here, listed))
    await council.over(window, *here)
    await council.end(*here)
    for _ in range(LAST_WINDOWS + 1):
        await council.next_window()
    assert listed not in (await council.lists(away)).values()
    # Only one of the deciding electors is left, and it does not have more than half of the stake.
    (left, *_) = [name for name in here if await council.shows(name, window)]
    for name in {*here} - {left}:
        bucket = council.stage.setup(name).account.name
        council.stage.server.faults.add(f"(GET|HEAD) /{bucket}[/?]", Status(403, "AccessDenied"), times=None)
    council.begin(away)
    # Each window checks one earlier window, the newest first. A busy machine misses some.
    async with asyncio.timeout(30):
        while not await published_by(council, [away], listed):
            await council.next_window()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(eventually(lambda: published_by(council, [away], listed)), 0.5)
    assert await council.reader.get_peer_list() == listed


async def published_by(council: Council, names: Iterable[str], listed: PeerList) -> bool:
    return all([listed in (await council.lists(name)).values() for name in names])


def report_of(applied: GatherResult[Update]) -> DebugReport:
    included = {str(one.uid): one.sha256 for one in applied.updates}
    hashes = dict.fromkeys(("fingerprint", "outer_fingerprint", "proof"), "a" * 64)
    return DebugReport(window=applied.window, uid=3, digest="", included=included, skipped={}, **hashes)


@pytest.mark.long
async def test_a_decided_set_that_nobody_has_any_more_is_voided_by_votes(council: Council) -> None:
    council.begin(*VALIDATORS)
    window = council.window
    await council.next_window(before_bound=True)
    await council.upload(window)
    decided = (await council.decided(window)).included
    assert [one.uid for one in decided.included] == [council.contexts["miner-1"].comms.uid]
    applied = await council.windows.of(window)
    assert len(applied.updates) == 1
    await council.pass_bound()
    await council.lose(*VALIDATORS)
    await council.hidden(window)
    stuck = asyncio.ensure_future(council.windows.of(window))
    council.begin(*VALIDATORS)
    agreement = Agreement(council.reader, council.windows)
    agreement.note(applied, report_of(applied))
    voided: tuple[int, ...] = ()
    for passed in range(VOID_WITHIN):
        assert not stuck.done()
        assert await agreement.first_divergence() is None
        await council.tried(window, min(passed + 1, 2))
        await council.next_window()
        voided = (await council.decided(council.window - 1)).voided
        if voided:
            break
    assert voided == (window,)
    # Nodes that waited continue without it, nodes that applied it roll back, and later nodes, or those that ask any
    # other elector, find nothing.
    gathered = await asyncio.wait_for(stuck, 10)
    assert (gathered.updates, gathered.published) == ((), True)
    assert await agreement.first_divergence() == Divergence(window, local_state_failed=False)
    newcomer = await council.stage.context(council.stage.setup("miner-1"))
    async with council.stage.running(newcomer.clock.run()):
        await newcomer.clock.wait_for_block(1)
        for comms in (newcomer.comms, *(council.contexts[name].comms for name in VALIDATORS)):
            found = await comms.get_included(window)
            assert found is not None
            assert found.included == ()


async def killed_before_the_aggregate(council: Council) -> int:
    """Kill all electors after they have decided a window, hide the miner's update, and return the window."""
    reached: list[str] = []

    async def killed(name: str) -> None:
        if name == "included":
            reached.append(name)
            await asyncio.Event().wait()

    token = hook.set(killed)
    council.begin(*VALIDATORS)
    hook.reset(token)
    window = council.window
    await council.next_window(before_bound=True)
    await council.upload(window)
    await council.stage.until(lambda: len(reached) == len(VALIDATORS))
    await council.end(*VALIDATORS)
    await council.hidden(window)
    return window


async def test_what_electors_have_found_is_on_their_disks_when_they_are_killed(council: Council) -> None:
    window = await killed_before_the_aggregate(council)
    council.begin(*VALIDATORS)
    await council.decided(window)
    applied = await asyncio.wait_for(council.windows.of(window), 20)
    assert [one.uid for one in applied.updates] == [council.contexts["miner-1"].comms.uid]


@pytest.mark.long
async def test_who_was_away_publishes_the_decided_updates_that_it_has_stored(council: Council) -> None:
    """No elector runs for longer than an election lasts, and no other node has the updates."""
    window = await killed_before_the_aggregate(council)
    for _ in range(LAST_WINDOWS + 1):
        await council.next_window()
    council.begin(*VALIDATORS)
    await council.decided(window)
    # Each window checks one earlier window.
    async with asyncio.timeout(60):
        while not (applied := await found_now(council, window)):
            await council.next_window()
    assert applied == [council.contexts["miner-1"].comms.uid]


async def found_now(council: Council, window: int) -> list[int]:
    """Return the uids whose updates of a past window a node without a vote can apply now."""
    with contextlib.suppress(StoreError, WindowLost, TimeoutError):
        return [one.uid for one in (await asyncio.wait_for(council.windows.find(window), 1.0)).updates]
    return []


async def test_a_window_without_votes_in_time_is_decided_void_by_all(council: Council) -> None:
    window = council.window
    await council.next_window(before_bound=True)
    await council.upload(window)
    await council.next_window()  # a window has passed, and no elector has voted
    council.begin(*VALIDATORS)
    decided = (await council.decided(window)).included
    assert decided.included == ()
    gathered = await council.windows.of(window)
    assert (gathered.updates, gathered.published) == ((), True)

"""The leading validator's peer lists: when they are published, their peers, and the window of effect.

Chain file, storage, buckets and score boards are real; all nodes have a permit, including miners. Tests advance the
time.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import FaultyChain

from tplr.chain.commitment import encode_commitment
from tplr.chain.hotkeys import new_hotkey
from tplr.chain.ledger import Ledger
from tplr.chain.local import LocalChain
from tplr.clock import first_block
from tplr.comms import Comms
from tplr.errors import StateError
from tplr.exchange import activity, ballot_box, peers
from tplr.keys import gradient_key
from tplr.localnet.plan import BLOCK_SECONDS
from tplr.node.leader import Leader
from tplr.node.replica import NodeContext
from tplr.schemas import VALID, Alignment, Evaluation, Evidence, LossChange, PeerList, PeerObservation
from tplr.scoring.board import Board, Outcome
from tplr.testing.s3server import Status

FREQUENCY, MARGIN, PROBATION = 4, 2, 3
# The leader is uid 0, the miners come next, and a second validator has the last uid.
VALIDATORS, MINERS = ("validator", "validator-2"), tuple(f"miner-{uid}" for uid in range(1, 7))
CONSTANTS = {
    "blocks_per_window": 4,
    "relay_seconds": 0.1,
    "peer_replacement_frequency": FREQUENCY,
    "peer_list_window_margin": MARGIN,
    "minimum_peers": 2,
    "max_topk_peers": 2,
    "reserve_peers": 1,
    "recent_windows": 1,
}
STRICT = {"probation_windows": PROBATION, "max_topk_peers": 3, "recent_windows": 3}


class Scores:
    """A validator's score board from synthetic evidence: a predicted gain for each miner in each window."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self.board = Board(run.stage.hparams)

    def measure(self, window: int, gains: Mapping[int, float], struck: Collection[int] = ()) -> Outcome:
        """``struck``: uids that are too many steps behind."""
        too_many = self._run.stage.hparams.sync_max_steps_behind + 1
        seen = {
            str(uid): PeerObservation(
                hotkey=self._run.comms.get_hotkey(uid) or "",
                listed=True,
                included=True,
                sampled=True,
                verdict=VALID,
                assigned_pages=True,
                evaluation=evaluation(gain),
                behind=too_many if uid in struck else 0,
            )
            for uid, gain in gains.items()
        }
        return self.board.see(Evidence(window=window, observations=seen, alignment=alignment(gains)))


def evaluation(gain: float) -> Evaluation:
    """Return losses that decrease as predicted, and more on the miner's own pages."""
    assigned, held_out = (
        LossChange(before=5.0, after=5.0 - part * gain, error=0.001, sequences=64) for part in (0.5, 0.2)
    )
    return Evaluation(assigned=assigned, held_out=held_out)


def alignment(gains: Mapping[int, float]) -> Alignment | None:
    """Return the alignment of mutually different steps of unit length."""
    if not gains:
        return None
    uids = sorted(gains)
    upper = np.eye(len(uids))[np.triu_indices(len(uids))]
    products = tuple(gains[uid] for uid in uids)
    return Alignment(uids=tuple(uids), products=products, norms=(1.0,) * len(uids), gram=tuple(upper.tolist()))


class Run:
    """The network's nodes, and the miners that the leader finds active.

    Attributes:
        start: the window in which a test begins.
        active: uids that upload in each window.
        comms: the leader's.
        reader: another validator's.
    """

    def __init__(self, stage: Any, contexts: dict[str, NodeContext]) -> None:
        self.stage = stage
        self.contexts = contexts
        self.active: tuple[int, ...] = (1, 2, 3, 4)
        self.comms: Comms = contexts["validator"].comms
        self.reader: Comms = contexts["validator-2"].comms
        self.start = self.window
        self.scores = Scores(self)

    @property
    def window(self) -> int:
        return self.contexts["validator"].clock.window

    def leader(self, name: str = "validator") -> Leader:
        return Leader(self.contexts[name], self.stage.hparams, self.stage.folder(name) / "start")

    def restarted(self, leader: Leader) -> Leader:
        again = self.leader()
        again.load_state_dict(leader.state_dict())
        return again

    @contextlib.contextmanager
    def administrator(self) -> Any:
        ledger = Ledger(self.stage.network.chain, clock=self.stage.clock)
        try:
            yield ledger
        finally:
            ledger.close()

    @contextlib.asynccontextmanager
    async def next_version(self) -> AsyncIterator[None]:
        """Restart the validators with the hparams of another run, in the same state folders."""
        self.stage.hparams = self.stage.hparams.model_copy(update={"spec_version": self.stage.hparams.spec_version + 1})
        self.contexts |= {name: await self.stage.context(self.stage.setup(name)) for name in VALIDATORS}
        self.comms, self.reader = (self.contexts[name].comms for name in VALIDATORS)
        clocks = [self.contexts[name].clock for name in VALIDATORS]
        async with self.stage.running(*(clock.run() for clock in clocks)):
            for clock in clocks:
                await clock.wait_for_window(0)
            await self.refresh()
            yield

    def bucket(self, name: str) -> str:
        return self.stage.setup(name).account.name

    def fails(self, what: str, action: Any, times: int | None = 1) -> None:
        self.stage.server.faults.add(f"^{what}", action, times=times)

    def silence(self, *uids: int) -> None:
        """Make the buckets of these miners silent."""
        for uid in uids:
            self.fails(f"(GET|HEAD) /{self.bucket(f'miner-{uid}')}[/?]", Status(503, "SlowDown"), times=None)

    async def begin(self, leader: Leader) -> int:
        """Return the start window that a leader decides; a window passes when it waits for the next one."""
        deciding = asyncio.ensure_future(leader.start_window())
        while not (await asyncio.wait([deciding], timeout=1.0))[0]:
            await self.next_window()
        self.start = self.window
        return deciding.result()

    async def refresh(self) -> None:
        for context in self.contexts.values():
            await context.comms.refresh()

    async def upload(self) -> None:
        """Upload an update of the current window by each active miner."""
        for uid in self.active:
            key = gradient_key(self.window, uid, self.stage.hparams.version)
            await self.contexts[f"miner-{uid}"].comms.own_store.put(key, b"an update")

    async def next_window(self) -> None:
        await self.upload()
        await self.pass_window()

    async def pass_window(self) -> None:
        """Advance the time exactly to the first block of the next window, on any machine."""
        goal = self.window + 1
        while await self.comms.chain.head() < first_block(goal, self.stage.hparams.blocks_per_window):
            self.stage.clock.advance(BLOCK_SECONDS)
        for name in VALIDATORS:
            await self.contexts[name].clock.wait_for_window(goal)

    async def lists(self, name: str = "validator") -> dict[int, PeerList]:
        """Return the published lists of a node, by first effective window."""
        comms = self.contexts[name].comms
        found = await peers.published_lists(comms.own_store, comms.signer)
        return {first: await peers.read_list(comms.own_store, first, comms.signer) for first in sorted(found)}

    async def renew(self, leader: Leader) -> PeerList | None:
        """Return the list that a leader publishes in this window, or None."""
        before = await self.lists()
        await leader.renew_peers(self.window, self.start, self.scores.board)
        new = [one for first, one in (await self.lists()).items() if first not in before]
        return new[0] if new else None

    async def live(self, leader: Leader, windows: int) -> dict[int, PeerList]:
        """Return the published lists, by windows after the start."""
        published = {}
        for _ in range(windows):
            if found := await self.renew(leader):
                published[self.window - self.start] = found
            await self.next_window()
        return published

    async def register_anew(self, *replaced: str) -> None:
        """Register other hotkeys at the uids and with the buckets of these miners."""
        hotkeys = {name: new_hotkey() for name in replaced}
        with self.administrator() as admin:
            for name in replaced:
                admin.deregister(self.stage.setup(name).address)
            for name, hotkey in hotkeys.items():
                admin.register(hotkey.ss58_address, f"cold-{name}", stake=100.0, permit=True)
        for name, hotkey in hotkeys.items():
            async with LocalChain(self.stage.network.chain, hotkey, clock=self.stage.clock) as chain:
                commit = chain.commit(encode_commitment(self.stage.setup(name).account.readable))
                await self.stage.clock.drive(commit, step=BLOCK_SECONDS / 10)
        await self.refresh()

    async def scored(self, leader: Leader, gains: Mapping[int, float], *struck: int) -> PeerList | None:
        """Return the list that a leader publishes after it has scored the current window, or None."""
        outcome = self.scores.measure(self.window, gains, struck)
        leader.see(self.window, self.scores.board, outcome.struck)
        await self.next_window()
        return await self.renew(leader)

    def measured(self, gains: Mapping[int, float]) -> None:
        """Record as many measured windows before the current one as probation takes."""
        for window in range(self.window - PROBATION, self.window):
            self.scores.measure(window, gains)


Opened = Callable[..., contextlib.AbstractAsyncContextManager[Run]]


@pytest.fixture
def opened(staged: Any) -> Opened:
    """Opens a run; without an election of included sets, the largest validator is the only elector."""

    @contextlib.asynccontextmanager
    async def opening(**constants: Any) -> AsyncIterator[Run]:
        async with staged(len(MINERS), validators=len(VALIDATORS), by_hand=True, **CONSTANTS | constants) as stage:
            admin = Ledger(stage.network.chain, clock=stage.clock)
            admin.set_limits(min_stake=1.0)  # so that all nodes keep their permits in the next epoch
            for name in MINERS:
                admin.set_permit(stage.setup(name).address)
            admin.close()
            contexts = {name: await stage.context(stage.setup(name)) for name in (*VALIDATORS, *MINERS)}
            clocks = [contexts[name].clock for name in VALIDATORS]
            async with stage.running(*(clock.run() for clock in clocks)):
                for clock in clocks:
                    await clock.wait_for_window(0)
                run = Run(stage, contexts)
                for _ in range(PROBATION):
                    await run.pass_window()
                await run.refresh()
                assert all(one.permit for one in run.comms.metagraph.neurons)
                await run.next_window()
                run.start = run.window
                yield run

    return opening


@pytest.fixture
async def run(opened: Opened) -> AsyncIterator[Run]:
    async with opened() as one:
        one.measured({1: 0.2, 2: 0.5, 3: 0.3})
        yield one


@pytest.fixture
async def strict(opened: Opened) -> AsyncIterator[Run]:
    """A run in which a place on the list is earned."""
    async with opened(**STRICT) as one:
        yield one


# --- the start ----------------------------------------------------------------------------------------------------


async def test_the_first_list_is_there_before_the_start_window(run: Run) -> None:
    run.active = (3, 4)
    await run.stage.clock.drive(run.comms.set_weights({1: 0.1, 5: 0.9}), step=BLOCK_SECONDS / 10)
    while not any(one.incentive for one in run.comms.metagraph.neurons):
        await run.next_window()
        await run.refresh()
    at, start = run.window, await run.begin(run.leader())
    assert at <= start - MARGIN <= run.window
    assert start == await run.reader.get_start_window()
    first = await run.reader.get_peer_list()
    assert first is not None
    assert (first.peers, first.reserve_peers, first.initial_selection) == ((1, 5), (3,), True)  # by incentive; active
    assert first.probation == (2, 3, 4, 6)
    assert first.first_effective_window == start


async def test_a_first_list_that_is_there_already_holds(run: Run) -> None:
    earlier = {
        first: PeerList(peers=(3,), initial_selection=True, sync_window=run.window, first_effective_window=first)
        for first in range(run.window + MARGIN, run.window + MARGIN + 3)  # on a slow machine it decides later
    }
    for one in earlier.values():
        await run.comms.post_peer_list(one)
    assert await run.begin(run.leader()) in earlier
    assert await run.lists() == earlier


async def test_a_start_that_fails_is_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain is down once, and the bucket refuses the start window once, after the list is in it."""
    monkeypatch.setattr("tplr.node.leader.WAIT_BLOCKS", 0.1)
    run.fails(f"PUT /{run.bucket('validator')}/start_window", Status(403, "AccessDenied"))
    chain = run.comms.chain = FaultyChain(run.comms.chain)
    chain.fail("metagraph", "lost")
    start = await run.begin(run.leader())
    assert await run.reader.get_start_window() == start
    assert list(await run.lists()) == [start]


async def test_a_start_during_which_the_disk_is_full_is_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = ballot_box.atomic_write, [True]

    def fails_once(path: Path, data: bytes) -> None:
        if full:
            full.clear()
            raise StateError(f"can't write {path}: No space left on device")
        write(path, data)

    monkeypatch.setattr(ballot_box, "atomic_write", fails_once)
    monkeypatch.setattr("tplr.node.leader.WAIT_BLOCKS", 0.1)
    assert await run.begin(run.leader()) == await run.reader.get_start_window()
    assert not full


async def test_a_state_folder_of_an_earlier_run_does_not_bind_in_the_next_one(run: Run) -> None:
    await run.begin(run.leader())
    assert (run.stage.folder("validator") / "start" / "vote-0").exists()
    async with run.next_version():
        start = await run.begin(run.leader())
        assert start == await run.reader.get_start_window()
        assert list(await run.lists()) == [start]


# --- later lists --------------------------------------------------------------------------------------------------


async def test_lists_come_every_few_windows_and_hold_some_windows_later(run: Run) -> None:
    published = await run.live(run.leader(), 2 * FREQUENCY + 1)
    assert list(published) == [FREQUENCY, 2 * FREQUENCY]
    for after, one in published.items():
        assert one.first_effective_window == run.start + after + MARGIN
        assert (one.peers, one.reserve_peers) == ((2, 3), (1,))  # by weight
    assert await run.reader.get_peer_list() == published[2 * FREQUENCY]


async def test_what_fails_is_tried_again_with_the_next_window(run: Run) -> None:
    run.fails(f"PUT /{run.bucket('validator')}/peers", Status(403, "AccessDenied"), times=2)
    assert list(await run.live(run.leader(), FREQUENCY + 4)) == [FREQUENCY + 2]


async def test_too_few_active_miners_leave_the_list_as_it_is(run: Run) -> None:
    leader, run.active = run.leader(), (1,)
    await run.next_window()
    assert await run.live(leader, FREQUENCY + 1) == {}
    run.active = (1, 2)
    await run.next_window()
    assert (await run.renew(leader)) is not None


async def test_a_validator_that_is_no_elector_publishes_what_the_electors_have_and_nothing_else(run: Run) -> None:
    leader, other = run.leader(), run.leader("validator-2")
    start = await run.begin(leader)
    run.fails(f"(GET|HEAD) /{run.bucket('validator')}[/?]", Status(403, "AccessDenied"), times=None)
    assert await other.renew_peers(run.window, run.start, run.scores.board) is None
    assert await run.lists("validator-2") == {}
    run.stage.server.faults.clear()
    for _ in range(FREQUENCY + 1):
        await run.refresh()
        await leader.renew_peers(run.window, run.start, run.scores.board)
        await other.renew_peers(run.window, run.start, run.scores.board)
        assert await run.lists("validator-2") == await run.lists()
        await run.next_window()
    assert len(await run.lists()) == 2
    assert other.wish is None
    assert await run.comms.get_start_window(run.reader.uid) == start


async def test_one_of_several_electors_publishes_what_was_decided(opened: Opened) -> None:
    async with opened(manifest_timeout_seconds=1.0) as run:
        run.measured({1: 0.2, 2: 0.5, 3: 0.3})
        assert not run.comms.alone
        leader = run.leader()
        assert await run.live(leader, FREQUENCY) == {}
        assert await run.renew(leader) is None
        wish = leader.wish
        assert wish
        assert (wish.peers, wish.reserve_peers) == ((2, 3), (1,))
        await leader.decided(None)
        assert leader.wish == wish
        # Most electors chose other peers: it does not repeat its own choice until the next list is due.
        other = wish.model_copy(update={"peers": (3, 4)})
        await leader.decided(other)
        assert (await run.lists(), leader.wish) == ({other.first_effective_window: other}, None)
        await run.next_window()
        assert await run.renew(leader) is None
        assert leader.wish is None
        # A list without changes is also published: otherwise electors that know different lists would not have the same
        # ones.
        again = other.model_copy(update={"first_effective_window": run.window + MARGIN})
        await leader.decided(again)
        assert (await run.lists())[again.first_effective_window] == again


async def test_a_decided_list_that_the_bucket_refuses_is_published_later(opened: Opened) -> None:
    async with opened(manifest_timeout_seconds=1.0) as run:
        leader = run.leader()
        found = PeerList(
            peers=(3, 4), initial_selection=False, sync_window=run.window, first_effective_window=run.window + MARGIN
        )
        run.fails(f"PUT /{run.bucket('validator')}/peers", Status(403, "AccessDenied"))
        await leader.decided(found)
        assert await run.lists() == {}
        assert await run.renew(leader) == found
        assert await run.renew(leader) is None


async def test_a_list_that_is_published_after_a_later_one_is_not_the_present_one(opened: Opened) -> None:
    """Its miners would be compared with those of the earlier list, and a list without a change would be proposed."""
    async with opened(**STRICT, manifest_timeout_seconds=1.0) as run:
        leader, of_both = run.leader(), {"probation": (4,), "initial_selection": False, "sync_window": run.window}
        first = PeerList(peers=(1, 2), first_effective_window=run.window + MARGIN, **of_both)
        later = PeerList(peers=(1, 2, 3), first_effective_window=run.window + MARGIN + 1, **of_both)
        run.measured({1: 0.5, 2: 0.5, 3: 0.5})
        run.active = (1, 2, 3)
        await run.upload()
        put = f"PUT /{run.bucket('validator')}/peers_{first.first_effective_window}"
        run.fails(put, Status(403, "AccessDenied"), times=2)
        for one in (first, later):
            await leader.decided(one)
        assert await run.lists() == {later.first_effective_window: later}
        await run.pass_window()
        assert await run.renew(leader) == first
        assert leader.wish is None


# --- earned places ------------------------------------------------------------------------------------------------


def names(found: PeerList | None) -> tuple[tuple[int, ...], ...] | None:
    return None if found is None else (found.peers, found.reserve_peers, found.probation)


async def test_at_launch_nobody_is_on_the_list_and_everybody_is_measured(strict: Run) -> None:
    await strict.begin(strict.leader())
    first = await strict.reader.get_peer_list()
    assert first is not None
    assert (names(first), first.initial_selection) == (((), (), (1, 2, 3, 4, 5, 6)), True)


async def test_who_is_proven_comes_onto_the_list_at_once(strict: Run) -> None:
    leader = strict.leader()
    await strict.begin(leader)
    gains = {1: 0.3, 2: 0.5, 3: -0.1}
    strict.scores.measure(strict.window - 1, gains | {4: 0.1})
    assert await strict.scored(leader, gains | {4: -0.01}) is None
    found = await strict.scored(leader, gains | {4: 0.06})
    assert names(found) == ((1, 2), (), (3, 4))  # 4 may be chance; fewer peers than places
    assert found is not None
    assert found.first_effective_window == strict.window + MARGIN
    assert leader.excluded == {3}
    assert await strict.scored(leader, gains | {4: 0.05}) is None  # nothing to change


async def test_a_newcomer_is_measured_at_once_and_comes_onto_a_full_list_when_it_is_renewed(opened: Opened) -> None:
    async with opened(**STRICT, peer_replacement_frequency=6) as run:
        leader = run.leader()
        await run.begin(leader)
        gains = {uid: 0.1 * uid for uid in (1, 2, 3, 4)}
        run.measured(gains)
        assert names(await run.scored(leader, gains)) == ((2, 3, 4), (1,), (1,))
        run.active = (1, 2, 3, 4, 5)
        gains[5] = 0.35
        assert names(await run.scored(leader, gains)) == ((2, 3, 4), (1,), (1, 5))
        for _ in range(3):
            assert await run.scored(leader, gains) is None
        assert run.scores.board.proven(5)
        assert names(await run.scored(leader, gains)) == ((3, 4, 5), (2,), (1, 2))


async def test_known_zeros_and_who_is_struck_leave_the_list_at_once(strict: Run) -> None:
    leader = strict.leader()
    await strict.begin(leader)
    gains = {1: 0.6, 2: 0.05, 3: 0.6}
    strict.measured(gains)
    assert names(await strict.scored(leader, gains)) == ((1, 2, 3), (), (4,))
    gains[2] = -0.3
    assert names(await strict.scored(leader, gains)) == ((1, 3), (), (2, 4))
    assert 2 in leader.excluded  # excluded from this node's sets, also while the old list is effective
    assert names(await strict.scored(leader, gains, 3)) == ((1,), (), (2, 3, 4))
    assert leader.excluded == {2, 3}
    # It stays off the list for the windows of a probation, for any earnings, also after a restart of the node.
    leader = strict.restarted(leader)
    for _ in range(PROBATION - 1):
        assert names(await strict.scored(leader, gains)) in (None, ((1,), (), (2, 3, 4)))
    assert names(await strict.scored(leader, gains)) == ((1, 3), (), (2, 4))


async def test_a_uid_that_is_registered_again_inherits_neither_a_place_nor_a_strike(strict: Run) -> None:
    leader = strict.leader()
    await strict.begin(leader)
    gains = {1: 0.6, 2: 0.6, 3: 0.6}
    strict.measured(gains)
    assert names(await strict.scored(leader, gains, 3)) == ((1, 2), (), (3, 4))
    await strict.register_anew("miner-2", "miner-3")  # neither was measured for long enough
    leader = strict.restarted(leader)
    assert names(await strict.scored(leader, gains)) == ((1,), (), (2, 3, 4))
    assert leader.excluded == {2}  # while the previous list is in effect
    assert names(await strict.scored(leader, gains)) in (None, ((1,), (), (2, 3, 4)))
    # 3 earns its place although the uid's previous miner was struck; 2 is not affected by its previous miner either.
    assert names(await strict.scored(leader, gains)) == ((1, 2, 3), (), (4,))
    assert leader.excluded == frozenset()


async def test_a_uid_that_is_registered_again_loses_its_place_before_it_has_a_score(strict: Run) -> None:
    """Its scores are of windows before the new owner's registration."""
    leader = strict.leader()
    await strict.begin(leader)
    gains = {1: 0.6, 2: 0.6}
    strict.measured(gains)
    assert names(await strict.scored(leader, gains)) == ((1, 2), (), (3, 4))
    await strict.register_anew("miner-2")
    assert names(await strict.scored(leader, {1: 0.6})) == ((1,), (), (2, 3, 4))
    assert leader.excluded == {2}


async def test_who_has_more_than_a_miner_s_stake_loses_its_place(strict: Run) -> None:
    """Nobody measures its updates, so it could harm unnoticed."""
    leader = strict.leader()
    await strict.begin(leader)
    gains = {1: 0.6, 2: 0.6}
    strict.measured(gains)
    assert names(await strict.scored(leader, gains)) == ((1, 2), (), (3, 4))
    with strict.administrator() as admin:
        admin.set_stake(strict.stage.setup("miner-2").address, strict.stage.hparams.eval_stake_limit + 1)
    assert await strict.scored(leader, gains) is None  # it is read with the next block
    await strict.refresh()
    found = await strict.scored(leader, gains)
    assert found is not None
    assert found.peers == (1,)
    assert leader.excluded == {2}


async def test_who_is_excluded_is_known_after_a_restart(strict: Run) -> None:
    leader = strict.leader()
    await strict.begin(leader)
    strict.measured({1: -0.1})
    await strict.scored(leader, {1: -0.1})
    assert strict.restarted(leader).excluded == leader.excluded == {1}
    saved = leader.state_dict()
    for change in ({"struck": 7}, {"struck": {"a": "b"}}, {"places": {"a": "b"}}, {"excluded": ["a"]}):
        with pytest.raises(StateError):
            leader.load_state_dict(saved | change)
    with pytest.raises(StateError):
        leader.load_state_dict({})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short patience: each window waits for silent buckets; busy machines need a second."""
    monkeypatch.setattr(activity, "ANSWER_SECONDS", 1.0)


@pytest.mark.usefixtures("impatient")
async def test_a_bucket_that_does_not_answer_costs_no_place_for_a_while(strict: Run) -> None:
    leader = strict.leader()
    await strict.begin(leader)
    gains = {1: 0.6, 2: 0.5}
    strict.measured(gains)
    assert names(await strict.scored(leader, gains)) == ((1, 2), (), (3, 4))
    while strict.window < strict.start + FREQUENCY - 1:
        assert await strict.scored(leader, gains) is None
    strict.active = (1, 3, 4)
    strict.silence(2)
    assert names(await strict.scored(leader, gains)) == ((1, 2), (), (3, 4))
    found = [await strict.scored(leader, gains) for _ in range(FREQUENCY)]
    assert [*map(names, found)] == [None] * (FREQUENCY - 1) + [((1,), (), (3, 4))]


@pytest.mark.usefixtures("impatient")
async def test_a_leader_that_restarts_without_a_network_empties_no_list(strict: Run) -> None:
    leader = strict.leader()
    await strict.begin(leader)
    gains = {1: 0.6, 2: 0.5}
    strict.measured(gains)
    assert names(await strict.scored(leader, gains)) == ((1, 2), (), (3, 4))
    while strict.window < strict.start + FREQUENCY - 1:
        await strict.next_window()
    strict.active = ()
    strict.silence(*range(1, len(MINERS) + 1))
    assert names(await strict.scored(strict.restarted(leader), gains)) == ((1, 2), (), ())


async def test_a_leader_without_scores_keeps_the_list(strict: Run) -> None:
    leader = strict.leader()
    await strict.begin(leader)
    gains = {1: 0.6, 2: 0.5}
    strict.measured(gains)
    assert names(await strict.scored(leader, gains)) == ((1, 2), (), (3, 4))
    while strict.window < strict.start + FREQUENCY - 1:
        await strict.next_window()
    other, strict.scores = strict.leader(), Scores(strict)
    assert names(await strict.scored(other, {})) == ((1, 2), (), (3, 4))
    assert other.excluded == frozenset()


async def test_the_documented_profile_has_no_probation(opened: Opened) -> None:
    async with opened(profile="documented") as run:
        published = await run.live(run.leader(), FREQUENCY + 1)
        assert [(len(one.peers), one.probation) for one in published.values()] == [(2, ())]

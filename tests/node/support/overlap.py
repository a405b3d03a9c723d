"""Miners with ``outer_delay`` 1 whose training lasts until the set of the window before interrupts it.

``BusyMiner`` trains by real time. ``HeldMiner`` waits for events alone; ``ByHand`` is a stage that makes them happen.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch
from deciding import publish_decision
from included import included_set

from tplr.clock import first_block
from tplr.errors import ObjectNotFound
from tplr.exchange.quorum import void as nothing
from tplr.hparams import HParams
from tplr.keys import commit_key
from tplr.localnet.plan import BLOCK_SECONDS
from tplr.node.miner import Miner
from tplr.node.replica import NodeContext, Replica
from tplr.schemas import PeerList
from tplr.seeds import derive
from tplr.training.fingerprint import digest
from tplr.training.schemes import outer_scheme

# Windows of 8 s: four nodes in one process keep up.
CONSTANTS = {
    "outer_delay": 1,
    "blocks_per_window": 16,
    "time_window_delta_seconds": 3,
    "commit_margin_seconds": 1.5,
    "minimum_peers": 2,
    "pages_per_window": 4,
    "manifest_timeout_seconds": 1.0,
    "checkpoint_frequency": 2,
}
INNER_STEPS = 1000
BATCH_SECONDS = 0.25


def many_steps(hparams: HParams) -> HParams:
    """With so many inner steps in a window that only its end ends it."""
    assert hparams.sparseloco is not None
    constants = hparams.sparseloco.model_copy(update={"inner_steps": INNER_STEPS})
    return hparams.model_copy(update={"sparseloco": constants})


class BusyMiner(Miner):
    """Its device needs so long for a batch that training never ends before its time, and there is one to interrupt.

    Attributes:
        interrupted: windows in whose training an earlier one was applied, and that were trained further.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.interrupted: set[int] = set()
        self._lacked: dict[int, int] = {}  # by trained window: the window that was to be applied when it began

    @property
    def training(self) -> bool:
        """Whether a window's training has begun and not ended; it may be paused."""
        return self._training is not None

    @property
    def paused(self) -> bool:
        """Whether a training is paused between two inner steps."""
        return self._train_state._unfinished is not None

    @property
    def expects(self) -> bool:
        """Whether a training that runs now is from weights with the expected step of this miner's own update."""
        return self.training and not self.paused and self._train_state._own is not None

    def _out_of_time(self) -> bool:
        time.sleep(BATCH_SECONDS)  # in the training's thread
        if (window := self._training) is not None and self._replica.window > self._lacked.setdefault(
            window, self._replica.window
        ):
            self.interrupted.add(window)
        return super()._out_of_time()


def began_before_it_held(stage: Any, node: str) -> list[int]:
    """Windows whose training ``node`` began before, and ended after, it had applied the window before."""
    applied = [(event["window"], event["time"]) for event in stage.of("applied", node)]
    return [
        event["window"]
        for event in stage.of("trained", node)
        if any(
            window == event["window"] - 1 and event["time"] - event["seconds"] < when < event["time"]
            for window, when in applied
        )
    ]


# Real time decides nothing: a training may begin at once, and whoever waits for a set waits until it is decided.
BY_HAND = {
    "outer_delay": 1,
    "blocks_per_window": 24,
    "time_window_delta_seconds": 5,
    "commit_margin_seconds": 10,
    "manifest_timeout_seconds": 60,
    "pages_per_window": 2,
    "gradient_retention_windows": 10**6,
}
FINAL_BLOCKS = 4  # after which a window's first block is final, and its updates still count
HELD_SECONDS = 60.0


class HeldMiner(Miner):
    """After the first batch, a training waits until somebody wants the model; it ends soon after ``enough`` is true.

    So each training but the first is interrupted by the set of the window before, on any machine.

    Attributes:
        enough: whether a window's training may end; by default, when all windows before it have been applied.
        holding: windows whose training has come to its first wait.
        lacking: those of them in which the window before was not applied yet; ``expecting``: and the weights had the
            expected step of this miner's own update.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enough: Callable[[int], object] = self.complete
        self.holding: set[int] = set()
        self.lacking: set[int] = set()
        self.expecting: set[int] = set()
        self._asked: dict[int, int] = {}  # by window, as the next
        self._after: dict[int, int] = {}

    def complete(self, window: int) -> bool:
        """Whether all windows before ``window`` are applied."""
        return self._replica.window >= window

    def _out_of_time(self) -> bool:
        """Called in the training's thread."""
        if (window := self._training) is None:
            return True
        self._asked[window] = self._asked.get(window, 0) + 1
        if self._asked[window] == 1:
            return False
        if window not in self.holding:
            self.lacking |= set() if self.complete(window) else {window}
            self.expecting |= {window} if self._train_state._own else set()
            self.holding.add(window)
        deadline = time.monotonic() + HELD_SECONDS
        while not (enough := self.enough(window)) and not self._replica.model.wanted():
            if self._training is None:
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody wanted the model in the training of window {window}")
            time.sleep(0.002)
        self._after[window] = self._after.get(window, 0) + bool(enough)
        return self._after[window] > 1


class ByHand:
    """A held miner, another one whose updates are made up, and a validator that decides when a test says so.

    Attributes:
        start: the run's first window.
        replica: of the miner; ``other`` is one of the validator, which has no model until a test opens it.
    """

    def __init__(self, stage: Any, miner: HeldMiner, replica: Replica, contexts: list[NodeContext]) -> None:
        self.stage = stage
        self.miner = miner
        self.replica = replica
        self._contexts = contexts
        self._mine, self._leader, self._sender = (context.comms for context in contexts)
        self.other: Replica = stage.replica(stage.setup("validator"), contexts[1])
        self._parameters = {name: torch.zeros(one.shape) for name, one in replica.train_state.parameters.items()}
        self._scheme = outer_scheme(self._parameters, stage.hparams)
        self.start = contexts[0].clock.window + 1
        self.tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Publish the peer list and the start window; the run's first window begins."""
        uids, start = tuple(sorted((self._mine.uid, self._sender.uid))), self.start
        peers = PeerList(peers=uids, initial_selection=True, sync_window=start, first_effective_window=start)
        await self._leader.post_peer_list(peers)
        await self._leader.post_start_window(start)
        await self.pass_into(start)

    async def pass_into(self, window: int) -> None:
        """Let time pass until the window's first block is final, and everybody knows."""
        block = first_block(window, self.stage.hparams.blocks_per_window) + FINAL_BLOCKS
        while (head := await self._leader.chain.head()) < block:
            self.stage.clock.advance((block - head) * BLOCK_SECONDS)
        for context in self._contexts:
            await context.clock.wait_for_block(block)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for what the miner does; if it has failed, the test does."""

        def reached() -> object:
            ended = [task for task in self.tasks if task.done()]
            assert not ended, [task.exception() for task in ended]
            return condition()

        await self.stage.until(reached, seconds=HELD_SECONDS)

    async def end(self, window: int) -> None:
        """The window ends in time for both miners' updates, while the miner trains the next window."""
        body, commit = self._made_up(window), None
        key = commit_key(window, self._mine.uid, self.stage.hparams.version)
        await self._sender.put_commit(window, hashlib.sha256(body).hexdigest())
        async with asyncio.timeout(HELD_SECONDS):
            while commit is None:
                with contextlib.suppress(ObjectNotFound):
                    commit = await self._mine.own_store.head(key)
                await asyncio.sleep(0.02)
        await self.until(lambda: window + 1 in self.miner.holding)
        await self.pass_into(window + 1)
        await self._sender.put_update(window, body)
        await self.until(lambda: window in [event["window"] for event in self.stage.of("uploaded", "miner-1")])

    async def decide(self, window: int, *, void: bool = False, voided: tuple[int, ...] = ()) -> None:
        """Decide a window's set: of all updates that are there, or none; and that earlier windows are ``voided``."""
        gathered = await self.other._windows.from_peers(window)
        included = included_set(gathered, self.stage.hparams.version)
        if void:
            included = nothing(window, included.version).included
        await publish_decision((self._leader,), included, voided=voided)

    async def applied(self, window: int) -> None:
        """Until the miner has applied the window, and all before it."""
        await self.until(lambda: self.replica.window > window and window in self.stage.held("miner-1"))

    async def models(self) -> tuple[str, str]:
        """Digests of the miner's model, for which its training pauses, and of the validator's after as many windows."""
        async with self.replica.model:
            mine, window = digest(self.replica.train_state.parameters), self.replica.window
        if self.other.window < 0:
            await self.other.open(self.start)
        await self.other.advance(until=window)
        return mine, digest(self.other.train_state.parameters)

    def _made_up(self, window: int) -> bytes:
        uid, step = self._sender.uid, window - self.start
        generator = torch.Generator().manual_seed(derive("made-up", uid, window) >> 1)
        work = {name: 0.01 * torch.randn(one.shape, generator=generator) for name, one in self._parameters.items()}
        return self._scheme.pack(work, step=step, window=window, uid=uid, pages_digest="0" * 64, batches=1)


@contextlib.asynccontextmanager
async def by_hand(staged: Any, scheme: str = "muon") -> AsyncIterator[ByHand]:
    """A stage in the first window of a run; the miner runs."""
    async with staged(2, scheme, by_hand=True, dated_by_hand=True, **BY_HAND) as stage:
        stage.hparams = many_steps(stage.hparams)
        leader, sender = [await stage.context(stage.setup(name)) for name in ("validator", "miner-2")]
        replica, data_loader, mine = await stage.node(stage.setup("miner-1"))
        contexts = [mine, leader, sender]
        async with stage.running(*(context.clock.run() for context in contexts)):
            for context in contexts:
                await context.clock.wait_for_block(1)
                await context.comms.refresh()
            hand = ByHand(stage, HeldMiner(replica, data_loader, mine, stage.hparams), replica, contexts)
            await hand.begin()
            async with hand.other, stage.running(hand.miner.run()) as hand.tasks:
                yield hand

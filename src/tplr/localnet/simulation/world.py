"""The simulated network: its windows, one after the other, and what its validator and leader decide."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from tplr.clock import WindowClock
from tplr.compress.payload import Update, parse
from tplr.errors import PayloadError, StoreError
from tplr.exchange import scores
from tplr.exchange.documents import put_document
from tplr.exchange.gather import GatherResult
from tplr.hparams import HParams
from tplr.keys import debug_key, gradient_key
from tplr.localnet.simulation.comms import SimulatedComms
from tplr.localnet.simulation.member import Member
from tplr.localnet.simulation.pages import SimulatedLoader, corpus
from tplr.localnet.simulation.settings import START_WINDOW, VALIDATOR, new_signer, new_train_state
from tplr.node.data_loader import WindowBatches, WindowDataLoader
from tplr.node.leader import Leader
from tplr.node.observation import Observation, score_report
from tplr.node.observer import Observer
from tplr.node.replica import NodeContext
from tplr.pcg64 import PCG64Stream
from tplr.schemas import PeerList, Reason
from tplr.scoring.board import Outcome
from tplr.scoring.profiles import score_board
from tplr.seeds import derive, page_draw, seed_window
from tplr.storage import MemoryStore
from tplr.telemetry import Telemetry
from tplr.training.loss import mean_loss

HELD_OUT_BATCHES = 16
PAGES_KEPT = 256  # more than the miners of a window use


@dataclass(frozen=True)
class WindowRecord:
    """Results of a window. ``loss``: on held-out text, before the window was applied; None if not measured."""

    window: int
    loss: float | None
    peers: tuple[int, ...]
    probation: tuple[int, ...]
    seen: Observation
    outcome: Outcome
    weights: dict[int, float]


@dataclass
class World:
    """The simulated network.

    Attributes:
        now: time of its stores, in seconds.
        measures_loss: whether it measures the loss in every window; that takes as long as training on 64 sequences.
        peers, probation: of the current window.
    """

    hparams: HParams
    members: Sequence[Member]
    seed: int = 0
    measures_loss: bool = True
    now: float = 0.0
    window: int = START_WINDOW
    records: list[WindowRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.train_state = new_train_state(self.hparams)
        self.spec = self.train_state.outer.spec
        self.by_uid = dict(enumerate(self.members, start=1))
        for uid, member in self.by_uid.items():
            member.join(self, uid)
        self.updates: dict[int, Update] = {}
        self.board = score_board(self.hparams)
        # No miner has a score yet, so the first list has all miners; in a run with probation it is empty.
        everybody = tuple(self.by_uid)
        self.peers: tuple[int, ...] = () if self.hparams.probation_windows else everybody
        self.probation: tuple[int, ...] = everybody if self.hparams.probation_windows else ()
        self.lists: list[PeerList] = []  # lists after the first
        self._excluded: dict[int, frozenset[int]] = {}  # by window
        self._pages: dict[int, WindowBatches] = {}
        comms, data_loader = SimulatedComms(self), SimulatedLoader(self)
        telemetry = Telemetry(role="validator", uid=0, listeners=())
        context = NodeContext(comms=cast(Any, comms), clock=cast(WindowClock, _Present(self)), telemetry=telemetry)
        self.comms, self.data_loader = comms, data_loader
        self.bucket = MemoryStore("validator", clock=lambda: self.now)
        self.signer = new_signer(self.hparams, VALIDATOR)
        self._observer = Observer(self.train_state, cast(WindowDataLoader, data_loader), context, self.hparams)
        self._leader = Leader(context, self.hparams, Path("unused"))  # unused, as the simulator chooses the start

    def block_hash(self, window: int) -> str:
        """Return the hash of the window's first block."""
        return f"{derive('block', self.seed, window):064x}"

    def parse(self, body: bytes, window: int, uid: int) -> Update:
        """Parse an update as every node does. Raises PayloadError."""
        return parse(body, self.spec, window=window, uid=uid)

    def pages(self, uid: int, window: int) -> WindowBatches:
        """Return the batches assigned to ``uid``."""
        sampler = page_draw(
            self.hparams.profile,
            uid=uid,
            window=window,
            pages_per_window=self.hparams.pages_per_window,
            block_hash=self.block_hash(seed_window(window)),
        )
        return self.pages_of_seed(sampler.seed)

    def pages_of_seed(self, seed: int) -> WindowBatches:
        """Return ``pages_per_window`` pieces of the corpus, each with the length of a batch, chosen by ``seed``."""
        if seed not in self._pages:
            if len(self._pages) > PAGES_KEPT:
                self._pages.clear()
            self._pages[seed] = self._draw(seed)
        return self._pages[seed]

    def _draw(self, seed: int) -> WindowBatches:
        h = self.hparams
        text, stream = corpus(h.model.vocab_size), PCG64Stream(seed)
        length = h.batch_size * h.sequence_length
        starts = [stream.integers(0, len(text) - length) for _ in range(h.pages_per_window)]
        batches = np.stack([text[start : start + length] for start in starts])
        digest = hashlib.sha256(str(starts).encode()).hexdigest()
        return WindowBatches(digest, batches.reshape(-1, h.batch_size, h.sequence_length))

    async def run(self, windows: int, *, on_window: Callable[[WindowRecord], None] | None = None) -> None:
        """Simulate ``windows`` windows; ``on_window`` is called with each record."""
        for _ in range(windows):
            await self._window()
            if on_window:
                on_window(self.records[-1])

    async def _window(self) -> None:
        window = self.window
        for listed in self.lists:
            if listed.first_effective_window == window:
                self.peers, self.probation = listed.peers, listed.probation
        for member in self.by_uid.values():
            await member.act(self, window)
            await self._remember(member, window)
        loss = self.held_out_loss() if self.measures_loss else None
        gathered = await self._gather(window)
        for member in self.by_uid.values():
            await member.after_set(self, window)
        seen = await self._observer.observe(gathered, self.board)
        outcome = self.board.see(seen.evidence)
        await self._publish(seen, outcome)
        self.train_state.apply([one.update for one in gathered.updates])
        await self._report(gathered)
        for member in self.by_uid.values():
            await member.report(self, window)
        self.records.append(WindowRecord(window, loss, self.peers, self.probation, seen, outcome, self.board.weights))
        await self._lead(outcome)
        self.window += 1

    async def _gather(self, window: int) -> GatherResult[Update]:
        """Gather the included set: valid updates of peers that the leader does not exclude."""
        excluded = self._excluded.pop(window, frozenset()).intersection(self.peers)
        asked = [uid for uid in self.peers if uid not in excluded]
        gathered = await self.comms.gather_updates(asked, window, self.spec)
        left_out = dict.fromkeys(sorted(excluded), Reason.EXCLUDED)
        return replace(gathered, skipped=gathered.skipped | left_out)

    async def _lead(self, outcome: Outcome) -> None:
        """Decide from this window's scores which miners are listed and excluded ``validator_offset`` windows later."""
        present = self.window + self.hparams.validator_offset
        self._leader.see(self.window, self.board, outcome.struck)
        self._excluded[present] = self._leader.excluded
        await self._leader.renew_peers(present, START_WINDOW, self.board)

    async def _publish(self, seen: Observation, outcome: Outcome) -> None:
        """Publish the validator's scores like a node."""
        report = score_report(seen, outcome, self.board, uid=VALIDATOR, weights_set=None)
        await scores.put_scores(self.bucket, report, self.signer)

    async def _report(self, gathered: GatherResult[Update]) -> None:
        """Publish the validator's report of a window like a node."""
        report = self.train_state.report(gathered, uid=VALIDATOR, block_hash=self.block_hash(gathered.window + 1))
        key = debug_key(report.window, VALIDATOR, self.hparams.version)
        await put_document(self.bucket, key, report, window=report.window, signer=self.signer)

    async def _remember(self, member: Member, window: int) -> None:
        """Keep a member's update for copiers, if it is valid."""
        try:
            body = await member.store.get(gradient_key(window, member.uid, self.hparams.version), max_bytes=2**30)
            self.updates[member.uid] = self.parse(body, window, member.uid)
        except (StoreError, PayloadError):
            pass  # some send no valid update

    def held_out_loss(self) -> float:
        """Return the loss on a fixed text, the same in every window and world; pages contain it only by chance."""
        pages = [self.pages_of_seed(derive("held-out", i)).batches for i in range(HELD_OUT_BATCHES)]
        return mean_loss(self.train_state.model, np.concatenate(pages)[:HELD_OUT_BATCHES], self.hparams.precision)


class _Present:
    """The clock of a validator, which scores windows that are ``validator_offset`` windows old."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def window(self) -> int:
        return self._world.window + self._world.hparams.validator_offset

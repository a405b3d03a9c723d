"""Simulates a network in one process, with real training, the real validator, and simulated time.

Miners write into buckets in memory, with time stamps of their choice. The code that nodes run then gathers, observes,
scores and applies each window. The chain and the dataset are simulated: block hashes follow from a seed, and pages are
pieces of Python's standard library.
"""

import functools
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from tplr.chain.base import Metagraph, Neuron
from tplr.clock import WindowClock
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update, parse
from tplr.errors import ObjectNotFound, PayloadError, StoreError
from tplr.exchange.activity import PeerGroups
from tplr.exchange.documents import get_document, put_document
from tplr.exchange.gather import HASH_FIELD, GatherResult, gather
from tplr.exchange.updates import UpdateRules
from tplr.hparams import HParams
from tplr.keys import commit_key, debug_key, gradient_key, scores_key
from tplr.node.data_loader import WindowBatches, WindowDataLoader
from tplr.node.observer import Observation, Observer, score_report
from tplr.node.replica import NodeContext
from tplr.node.train_state import TrainState
from tplr.pcg64 import PCG64Stream
from tplr.schemas import DebugReport, PeerList, ScoreReport, UploadBounds
from tplr.scoring.board import Outcome, ScoreBoard
from tplr.scoring.selection import next_peers
from tplr.seeds import derive, held_out_page_draw, page_draw, proof_seed, seed_window
from tplr.storage import MemoryStore, ObjectStore
from tplr.telemetry import Telemetry
from tplr.training.loss import mean_loss
from tplr.training.model import build_model
from tplr.training.schemes import outer_scheme

WINDOW_SECONDS = 100.0
LONG_AGO = 1e6  # seconds since a window's end: gathering waits for nothing
CORPUS_BYTES = 8_000_000
# Large enough that a page has tokens of its own, which only training on that page teaches.
VOCABULARY = 1024
SINGLE_BYTES = 256
HELD_OUT_BATCHES = 16
VALIDATOR = 0
START_WINDOW = 1


class Member:
    """A miner; subclasses define ``act``.

    Attributes:
        train_state: its own if ``own_model``, else the world's.
        outer: its error feedback; packs its updates.
        committed, sent: seconds after a window's end by which its commit and its update are stamped.
        uploaded: windows in which it sent an update.
    """

    name = ""
    honest = True
    own_model = False
    committed, sent = -5.0, 2.0

    def join(self, world: "World", uid: int) -> None:
        """Join the network; called once, by ``World``."""
        self.uid = uid
        self.hotkey = f"hotkey-{uid}"
        self.uploaded: set[int] = set()
        self.store = MemoryStore(f"bucket-{uid}", clock=lambda: world.now)
        self.train_state = new_train_state(world.hparams) if self.own_model else world.train_state
        self.outer = outer_scheme(self.train_state.parameters, world.hparams)

    async def act(self, world: "World", window: int) -> None:
        """Do the work of a window."""
        raise NotImplementedError

    async def publish(self, world: "World", window: int, body: bytes) -> None:
        """Write commit and update."""
        end, version = WINDOW_SECONDS * (window + 1), world.hparams.version
        world.now = end + self.committed
        hashed = hashlib.sha256(body).hexdigest()
        await self.store.put(commit_key(window, self.uid, version), b"", metadata={HASH_FIELD: hashed})
        world.now = end + self.sent
        await self.store.put(gradient_key(window, self.uid, version), body)
        self.uploaded.add(window)


@dataclass(frozen=True)
class WindowRecord:
    """Results of a window. ``loss``: on held-out text, before the window was applied."""

    window: int
    loss: float
    peers: tuple[int, ...]
    seen: Observation
    outcome: Outcome
    weights: dict[int, float]


@dataclass
class World:
    """The network. ``now`` is its stores' time in seconds."""

    hparams: HParams
    members: Sequence[Member]
    seed: int = 0
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
        self.board = ScoreBoard(self.hparams)
        self.peers: tuple[int, ...] = tuple(self.by_uid)
        self._proofs: dict[tuple[int, int], str] = {}
        comms, data_loader = _Comms(self), _DataLoader(self)
        telemetry = Telemetry(role="validator", uid=0, listeners=())
        context = NodeContext(comms=cast(Any, comms), clock=cast(WindowClock, None), telemetry=telemetry)
        self.comms, self.data_loader = comms, data_loader
        self.bucket = MemoryStore("validator", clock=lambda: self.now)
        self._observer = Observer(self.train_state, cast(WindowDataLoader, data_loader), context, self.hparams)

    def block_hash(self, window: int) -> str:
        """Of the window's first block."""
        return f"{derive('block', self.seed, window):064x}"

    def parse(self, body: bytes, window: int, uid: int) -> Update:
        """As every node does. Raises PayloadError."""
        return parse(body, self.spec, window=window, uid=uid)

    def pages(self, uid: int, window: int) -> WindowBatches:
        """The batches assigned to ``uid``."""
        sampler = page_draw(
            self.hparams.profile,
            uid=uid,
            window=window,
            pages_per_window=self.hparams.pages_per_window,
            block_hash=self.block_hash(seed_window(window)),
        )
        return self.pages_of_seed(sampler.seed)

    def pages_of_seed(self, seed: int) -> WindowBatches:
        """``pages_per_window`` pieces of the corpus, each of the length of a batch, chosen by ``seed``."""
        h = self.hparams
        text, stream = corpus(h.model.vocab_size), PCG64Stream(seed)
        length = h.batch_size * h.sequence_length
        starts = [stream.integers(0, len(text) - length) for _ in range(h.pages_per_window)]
        batches = np.stack([text[start : start + length] for start in starts])
        digest = hashlib.sha256(str(starts).encode()).hexdigest()
        return WindowBatches(digest, batches.reshape(-1, h.batch_size, h.sequence_length))

    async def run(self, windows: int, *, on_window: Callable[[WindowRecord], None] | None = None) -> None:
        """Simulate this number of windows; ``on_window`` gets each record."""
        for _ in range(windows):
            await self._window()
            if on_window:
                on_window(self.records[-1])

    async def _window(self) -> None:
        window = self.window
        for member in self.by_uid.values():
            await member.act(self, window)
            await self._remember(member, window)
        loss = self.held_out_loss()
        peers = self.peers
        gathered = await self.comms.gather_updates(peers, window, self.spec)
        seen = await self._observer.observe(gathered, self.board.peer_scores)
        outcome = self.board.see(seen.observations, window)
        await self._publish(seen, outcome)
        self.train_state.apply([one.update for one in gathered.updates])
        self._prove(window)
        await self._report(gathered)
        self.records.append(WindowRecord(window, loss, peers, seen, outcome, self.board.weights))
        self.window += 1
        if self.window % self.hparams.peer_replacement_frequency == 0:
            self._renew_peers()

    async def _publish(self, seen: Observation, outcome: Outcome) -> None:
        """Publish the validator's scores, as a node does."""
        report = score_report(seen, outcome, self.board, uid=VALIDATOR, weights_set=None)
        await put_document(self.bucket, scores_key(seen.window, VALIDATOR, self.hparams.version), report)

    async def _report(self, gathered: GatherResult[Update]) -> None:
        """Publish the validator's report of a window, as a node does."""
        report = self.train_state.report(gathered, uid=VALIDATOR, block_hash=self.block_hash(gathered.window + 1))
        await put_document(self.bucket, debug_key(report.window, VALIDATOR, self.hparams.version), report)

    async def _remember(self, member: Member, window: int) -> None:
        """Keep valid updates, for copiers."""
        try:
            body = await member.store.get(gradient_key(window, member.uid, self.hparams.version), max_bytes=2**30)
            self.updates[member.uid] = self.parse(body, window, member.uid)
        except (StoreError, PayloadError):
            pass  # some send no valid update

    def held_out_loss(self) -> float:
        """Loss on text that pages contain only by chance; the same text in every window and every world."""
        pages = [self.pages_of_seed(derive("held-out", i)).batches for i in range(HELD_OUT_BATCHES)]
        return mean_loss(self.train_state.model, np.concatenate(pages)[:HELD_OUT_BATCHES], self.hparams.precision)

    def _prove(self, window: int) -> None:
        for member in self.by_uid.values():
            seed = proof_seed(uid=member.uid, window=window, block_hash=self.block_hash(window + 1))
            self._proofs[member.uid, window] = member.train_state.fingerprint(seed)

    def proof(self, uid: int, window: int) -> str:
        """The proof that ``uid`` reports. Raises KeyError."""
        return self._proofs[uid, window]

    def _renew_peers(self) -> None:
        h = self.hparams
        active = self.comms.active(self.window)
        found = next_peers(
            active,
            self.board.weights,
            at_least=h.minimum_peers,
            at_most=h.max_topk_peers,
            reserve=h.reserve_peers,
            seed=self.window,
        )
        self.peers = self.peers if found is None else found.peers


class _Comms:
    """The part of ``Comms`` that observer and auditor use."""

    hotkey = "validator"

    def __init__(self, world: World) -> None:
        self._world = world
        self.clock = _Clock()
        self.commitments = dict.fromkeys(world.by_uid)
        self.metagraph = Metagraph(
            0,
            tuple(
                Neuron(uid=uid, hotkey=one.hotkey, coldkey="", stake=0.0, permit=False, last_update=0)
                for uid, one in world.by_uid.items()
            ),
        )

    def get_hotkey(self, uid: int) -> str:
        return self.hotkey

    def store_of(self, uid: int) -> ObjectStore:
        return self._world.bucket if uid == VALIDATOR else self._world.by_uid[uid].store

    async def get_peer_list(self, window: int) -> PeerList:
        peers = self._world.records[window - START_WINDOW].peers
        return PeerList(peers=peers, initial_selection=False, sync_window=window, first_effective_window=window)

    async def get_included(self, window: int) -> None:
        """No set is published: a window is defined by the leading validator's report."""

    async def get_scores(self, uid: int, window: int) -> ScoreReport:
        return await get_document(self.store_of(uid), scores_key(window, uid, self._world.hparams.version), ScoreReport)

    async def window_hash(self, window: int) -> str:
        return self._world.block_hash(window)

    def active(self, window: int) -> tuple[int, ...]:
        recent = {*range(window - self._world.hparams.recent_windows, window)}
        return tuple(uid for uid, member in self._world.by_uid.items() if recent & member.uploaded)

    async def track_active_peers(self, window: int) -> PeerGroups:
        return PeerGroups(active=(active := self.active(window)), eval=active)

    async def gather_updates(
        self, uids: Iterable[int], window: int, spec: PayloadSpec, *, patient: bool = False
    ) -> GatherResult[Update]:
        world, end = self._world, WINDOW_SECONDS * (window + 1)
        bounds = UploadBounds(end, end + world.hparams.time_window_delta_seconds)
        rules = UpdateRules.of(window, bounds, world.hparams, spec, ended_ago=LONG_AGO, patient=patient)
        return await gather({uid: world.by_uid[uid].store for uid in uids}, rules)

    async def get_report(self, uid: int, window: int) -> DebugReport:
        if uid == VALIDATOR:
            key = debug_key(window, uid, self._world.hparams.version)
            return await get_document(self._world.bucket, key, DebugReport)
        try:
            proof = self._world.proof(uid, window)
        except KeyError:
            raise ObjectNotFound(f"uid {uid} has no report of window {window}") from None
        return DebugReport(window=window, uid=uid, fingerprint=proof, proof=proof, digest="", included={}, skipped={})


class _Clock:
    """A clock far after the simulated windows."""

    window = 10**6


class _DataLoader:
    """The part of ``WindowDataLoader`` that observer and auditor use."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def digest(self, uid: int, window: int) -> str:
        return self._world.pages(uid, window).digest

    async def assigned(self, uid: int, window: int) -> WindowBatches:
        return self._world.pages(uid, window)

    def read_ahead(self, uid: int, window: int) -> None:
        pass

    async def held_out(self, window: int, hotkey: str, apart_from: Iterable[int]) -> WindowBatches:
        sampler = held_out_page_draw(hotkey=hotkey, block_hash=self._world.block_hash(window + 1))
        return self._world.pages_of_seed(sampler.seed)


@functools.cache
def corpus(vocabulary: int) -> np.ndarray:
    """The standard library's sources, one int64 token for two bytes: frequent pairs by rank, 0 for rare ones.

    With a vocabulary of ``SINGLE_BYTES`` a token is one byte.
    """
    folder, parts, size = Path(sysconfig.get_path("stdlib")), [], 0
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "test" not in str(path.relative_to(folder)) and "site-packages" not in str(path):
            parts.append(path.read_bytes())
            size += len(parts[-1])
            if size > CORPUS_BYTES:
                break
    text = b"".join(parts)
    if vocabulary == SINGLE_BYTES:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    pairs = np.frombuffer(text, dtype="<u2", count=len(text) // 2)
    frequent = np.argsort(-np.bincount(pairs, minlength=2**16), kind="stable")[: vocabulary - 1]
    token_of = np.zeros(2**16, dtype=np.int64)
    token_of[frequent] = np.arange(1, vocabulary)
    return token_of[pairs]


def new_train_state(hparams: HParams) -> TrainState:
    """A state with the run's first weights, which is never saved."""
    train_state = TrainState(build_model(hparams), hparams, Path())
    train_state.start_window = START_WINDOW
    return train_state


def small(hparams: HParams, *, vocabulary: int = VOCABULARY, **changes: Any) -> HParams:
    """Constants of a simulation: a small model that learns within 30 windows on one core."""
    model = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    run = {
        "model": hparams.model.model_copy(update=model),
        "sequence_length": 64,
        "batch_size": 8,
        "pages_per_window": 8,
        "validator_sample_rate": 1.0,
        "uids_per_window": 64,
        "minimum_peers": 1,
        "peer_replacement_frequency": 2,
    }
    return hparams.model_copy(update={**run, **changes})

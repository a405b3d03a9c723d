"""Simulates a network in one process, with real training, the real validator, and simulated time.

Miners write into in-memory buckets, with time stamps of their choice. The nodes' own code then gathers, observes,
scores and applies each window. Chain and dataset are simulated: block hashes follow from a seed, and pages are pieces
of Python's standard library.
"""

import functools
import hashlib
import sysconfig
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from bittensor_core import Keypair

from tplr.chain.base import Metagraph, Neuron
from tplr.chain.electors import Elector, Electors
from tplr.clock import WindowClock
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update, parse
from tplr.errors import PayloadError, StoreError, StoreUnavailable
from tplr.exchange import scores
from tplr.exchange.activity import PeerGroups
from tplr.exchange.documents import get_document, put_document
from tplr.exchange.envelope import Author, Run, Signer
from tplr.exchange.gather import HASH_FIELD, GatherResult, gather
from tplr.exchange.updates import UpdateRules
from tplr.hparams import HParams
from tplr.keys import commit_key, debug_key, gradient_key
from tplr.localnet.plan import Scheme, scheme_constants
from tplr.node.data_loader import WindowBatches, WindowDataLoader
from tplr.node.leader import Leader
from tplr.node.observation import Observation, score_report
from tplr.node.observer import Observer
from tplr.node.replica import NodeContext
from tplr.node.train_state import TrainState
from tplr.pcg64 import PCG64Stream
from tplr.schemas import DebugReport, ObjectInfo, PeerList, Reason, ScoreReport, UploadBounds
from tplr.scoring.board import Outcome
from tplr.scoring.profiles import score_board
from tplr.seeds import derive, held_out_page_draw, page_draw, proof_seed, seed_window
from tplr.storage import MemoryStore, ObjectStore
from tplr.telemetry import Telemetry
from tplr.training.loss import mean_loss
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme

WINDOW_SECONDS = 100.0
LONG_AGO = 1e6  # seconds since a window's end, so that gathering never waits
CORPUS_BYTES = 8_000_000
# Large enough that each page has specific tokens, which only training on that page teaches.
VOCABULARY = 1024
SINGLE_BYTES = 256
HELD_OUT_BATCHES = 16
EVALUATION_BATCH = 32
PAGES_KEPT = 256  # more than the miners of a window use
VALIDATOR = 0
START_WINDOW = 1

T = TypeVar("T")


class Bucket(MemoryStore):
    """A miner's bucket; it does not answer while ``silent``."""

    silent = False

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        if self.silent:
            # The requested wait exceeds every deadline, so no reader retries.
            raise StoreUnavailable("no answer", bucket=self.name, retry_after=LONG_AGO)
        return await super()._run(function, *arguments)


class Member:
    """A miner; subclasses define ``act``.

    Attributes:
        train_state: its own state if ``own_model``, else the world's.
        local: its local training, with the optimizer's moments if the scheme has any.
        outer: its outer scheme, which packs its updates, with its error feedback.
        committed, sent: time stamps of its commit and its update, in seconds after a window's end.
        uploaded: windows in which it sent an update.
    """

    name = ""
    honest = True
    own_model = False
    committed, sent = -5.0, 2.0

    @property
    def hotkey(self) -> str:
        return self.signer.hotkey

    def join(self, world: "World", uid: int) -> None:
        """Join the network; called once, by ``World``."""
        self.uid = uid
        self.signer = new_signer(world.hparams, uid)
        self.uploaded: set[int] = set()
        self.store = Bucket(f"bucket-{uid}", clock=lambda: world.now)
        self.train_state = new_train_state(world.hparams) if self.own_model else world.train_state
        self.local = local_training(self.train_state.parameters, world.hparams)
        self.outer = outer_scheme(self.train_state.parameters, world.hparams)

    async def act(self, world: "World", window: int) -> None:
        """Do the miner's work of a window."""
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

    async def after_set(self, world: "World", window: int) -> None:
        """Act after the window's included set is published, before validators read again."""

    async def report(self, world: "World", window: int) -> None:
        """Publish its report after a window, with the proof of its model."""
        seed = proof_seed(uid=self.uid, window=window, block_hash=world.block_hash(window + 1))
        proof = self.train_state.fingerprint(seed)
        report = DebugReport(
            window=window,
            uid=self.uid,
            fingerprint=proof,
            outer_fingerprint=self.train_state.outer_fingerprint(seed),
            proof=proof,
            digest="",
            included={},
            skipped={},
        )
        key = debug_key(window, self.uid, world.hparams.version)
        await put_document(self.store, key, report, window=window, signer=self.signer)


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
        comms, data_loader = _Comms(self), _DataLoader(self)
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


class _Comms:
    """The part of ``Comms`` that observer, leader and auditor use."""

    uid = VALIDATOR
    electors = frozenset({VALIDATOR})
    alone = True

    def __init__(self, world: World) -> None:
        self._world = world
        self.hotkey = new_signer(world.hparams, VALIDATOR).hotkey
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

    def author(self, uid: int) -> Author:
        return self._world.signer if uid == VALIDATOR else self._world.by_uid[uid].signer

    def store_of(self, uid: int) -> ObjectStore:
        return self._world.bucket if uid == VALIDATOR else self._world.by_uid[uid].store

    async def get_peer_list(self, window: int | None = None) -> PeerList:
        world = self._world
        if window is None and world.lists:
            return world.lists[-1]
        listed = world if window in (None, world.window) else world.records[window - START_WINDOW]
        return PeerList(
            peers=listed.peers,
            probation=listed.probation,
            initial_selection=False,
            sync_window=world.window if window is None else window,
            first_effective_window=world.window if window is None else window,
        )

    async def post_peer_list(self, listed: PeerList) -> None:
        self._world.lists.append(listed)

    async def get_included(self, window: int) -> None:
        """Return None: no set is published, so the leading validator's report defines a window."""

    def is_voided(self, _: int) -> bool:
        return False

    async def get_aggregate(self, _: object) -> None:
        """Return None: the simulation has no aggregates."""

    async def get_commit(self, uid: int, window: int) -> ObjectInfo:
        return await self.store_of(uid).head(commit_key(window, uid, self._world.hparams.version))

    async def upload_bounds(self, window: int, delta_seconds: float) -> UploadBounds:
        end = WINDOW_SECONDS * (window + 1)
        return UploadBounds(end, end + delta_seconds)

    async def buckets_in(self, _: int) -> dict[int, None]:
        """Return the current buckets, which do not change in the simulation."""
        return self.commitments

    async def hotkeys_in(self, _: int) -> dict[int, str]:
        return {neuron.uid: neuron.hotkey for neuron in self.metagraph.neurons}

    async def witnessed(self, *_: object) -> dict[int, bytes]:
        return {}

    async def electors_in(self, _: int) -> Electors:
        return Electors((Elector(VALIDATOR, self.hotkey, 1),))

    async def agreed(self, ask: Callable[[int], Awaitable[Any]], **_: object) -> Any:
        return await ask(VALIDATOR)

    async def get_scores(self, uid: int, window: int) -> ScoreReport:
        # Scores are not sealed: this simulation sets no weights.
        hparams = self._world.hparams.model_copy(update={"sealed_scores": False})
        return await scores.get_scores(self.store_of(uid), window, self.author(uid), hparams)

    async def window_hash(self, window: int) -> str:
        return self._world.block_hash(window)

    def active(self, window: int) -> tuple[int, ...]:
        recent = {*range(window - self._world.hparams.recent_windows, window)}
        members = self._world.by_uid.items()
        return tuple(uid for uid, one in members if recent & one.uploaded and not one.store.silent)

    async def track_active_peers(self, window: int) -> PeerGroups:
        active = self.active(window)
        silent = tuple(uid for uid, member in self._world.by_uid.items() if member.store.silent)
        return PeerGroups(active=active, eval=active, unknown=silent)

    async def gather_updates(
        self,
        uids: Collection[int],
        window: int,
        spec: PayloadSpec,
        *,
        sha256s: Mapping[int, str] | None = None,
        patient: bool = False,
        within: float | None = None,
    ) -> GatherResult[Update]:
        world = self._world
        bounds = await self.upload_bounds(window, world.hparams.time_window_delta_seconds)
        rules = UpdateRules.of(
            window, bounds, world.hparams, spec, ended_ago=LONG_AGO, patient=patient, sha256s=sha256s
        )
        # Silent buckets are skipped, because waiting for them would take real time.
        silent = {uid for uid in uids if world.by_uid[uid].store.silent}
        found = await gather({uid: world.by_uid[uid].store for uid in uids if uid not in silent}, rules)
        return replace(found, skipped=found.skipped | dict.fromkeys(sorted(silent), Reason.UNAVAILABLE))

    async def get_report(self, uid: int, window: int) -> DebugReport:
        key = debug_key(window, uid, self._world.hparams.version)
        return await get_document(self.store_of(uid), key, DebugReport, window=window, author=self.author(uid))


class _Clock:
    """A clock far after the simulated windows."""

    window = 10**6


class _DataLoader:
    """The part of ``WindowDataLoader`` that observer and auditor use, with few large batches, which cost less."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def digest(self, uid: int, window: int) -> str:
        return self._world.pages(uid, window).digest

    async def assigned(self, uid: int, window: int) -> WindowBatches:
        return _rebatched(self._world.pages(uid, window))

    def read_ahead(self, uid: int, window: int) -> None:
        pass

    async def held_out(self, window: int, hotkey: str, apart_from: Iterable[int]) -> WindowBatches:
        sampler = held_out_page_draw(hotkey=hotkey, block_hash=self._world.block_hash(window + 1))
        return _rebatched(self._world.pages_of_seed(sampler.seed))


def _rebatched(pages: WindowBatches) -> WindowBatches:
    """Return the same sequences in batches of ``EVALUATION_BATCH``, if they fill whole batches."""
    sequences = pages.batches.reshape(-1, pages.batches.shape[-1])
    size = EVALUATION_BATCH if len(sequences) % EVALUATION_BATCH == 0 else pages.batches.shape[1]
    return replace(pages, batches=sequences.reshape(-1, size, sequences.shape[1]))


@functools.cache
def corpus(vocabulary: int) -> np.ndarray:
    """Return the standard library's sources, one int64 token for two bytes: frequent pairs by rank, 0 for rare ones.

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


def new_signer(hparams: HParams, uid: int) -> Signer:
    """Return the signer of ``uid``; it has the same hotkey in every world."""
    return Signer.with_key(Run(0, hparams.version), uid, Keypair.create_from_uri(f"//{uid}"))


def new_train_state(hparams: HParams) -> TrainState:
    """Return a state with the run's initial weights, which is never saved."""
    train_state = TrainState(build_model(hparams), hparams, Path())
    train_state.start_window = START_WINDOW
    return train_state


def profile(scheme: Scheme) -> HParams:
    """Return the constants of a localnet run with a scheme."""
    return HParams.model_validate(scheme_constants(scheme))


def small(hparams: HParams, *, vocabulary: int = VOCABULARY, **changes: Any) -> HParams:
    """Return the constants of a simulation: a small model that learns within 30 windows on one core."""
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
        "probation_windows": 0,
    }
    return hparams.model_copy(update={**run, **changes})

"""A miner of a simulated network, and its bucket."""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from tplr.errors import StoreUnavailable
from tplr.exchange.documents import put_document
from tplr.exchange.gather import HASH_FIELD
from tplr.keys import commit_key, debug_key, gradient_key
from tplr.localnet.simulation.settings import LONG_AGO, WINDOW_SECONDS, new_signer, new_train_state
from tplr.schemas import DebugReport
from tplr.seeds import proof_seed
from tplr.storage import MemoryStore
from tplr.training.schemes import local_training, outer_scheme

if TYPE_CHECKING:
    from tplr.localnet.simulation.world import World

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

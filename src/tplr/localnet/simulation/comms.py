"""The part of ``Comms`` that observer, leader and auditor use, on in-memory buckets and a simulated chain."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tplr.chain.base import Metagraph, Neuron
from tplr.chain.electors import Elector, Electors
from tplr.compress.layout import PayloadSpec
from tplr.compress.payload import Update
from tplr.exchange import scores
from tplr.exchange.activity import PeerGroups
from tplr.exchange.documents import get_document
from tplr.exchange.envelope import Author
from tplr.exchange.gather import GatherResult, gather
from tplr.exchange.updates import UpdateRules
from tplr.keys import commit_key, debug_key
from tplr.localnet.simulation.settings import LONG_AGO, START_WINDOW, VALIDATOR, WINDOW_SECONDS, new_signer
from tplr.schemas import DebugReport, ObjectInfo, PeerList, Reason, ScoreReport, UploadBounds
from tplr.storage import ObjectStore

if TYPE_CHECKING:
    from tplr.localnet.simulation.world import World


class SimulatedComms:
    """The part of ``Comms`` that observer, leader and auditor use."""

    uid = VALIDATOR
    electors = frozenset({VALIDATOR})
    alone = True

    def __init__(self, world: "World") -> None:
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
        """Return None: no set is published, so the only validator's report defines a window."""

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

    async def metagraph_in(self, _: int) -> Metagraph:
        return self.metagraph

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
        rules = _Rules.of(window, bounds, world.hparams, spec, ended_ago=LONG_AGO, patient=patient, sha256s=sha256s)
        rules = replace(rules, known=world.updates)
        # Silent buckets are skipped, because waiting for them would take real time.
        silent = {uid for uid in uids if world.by_uid[uid].store.silent}
        found = await gather({uid: world.by_uid[uid].store for uid in uids if uid not in silent}, rules)
        return replace(found, skipped=found.skipped | dict.fromkeys(sorted(silent), Reason.UNAVAILABLE))

    async def get_report(self, uid: int, window: int) -> DebugReport:
        key = debug_key(window, uid, self._world.hparams.version)
        return await get_document(self.store_of(uid), key, DebugReport, window=window, author=self.author(uid))


@dataclass(frozen=True, kw_only=True)
class _Rules(UpdateRules):
    """The rules for updates; those in ``known``, by uid, were parsed before."""

    known: Mapping[int, Update] = field(default_factory=dict, repr=False)

    def parse(self, body: bytes, uid: int) -> Update:
        known = self.known.get(uid)
        return known if known and (known.window, known.body) == (self.window, body) else super().parse(body, uid)


class _Clock:
    """A clock far after the simulated windows."""

    window = 10**6

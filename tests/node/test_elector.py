"""Three validators decide windows over real storage and a real chain file; later one of them is silent."""

import asyncio
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tplr.errors import WindowLost
from tplr.exchange.aggregates import Included, IncludedSet
from tplr.exchange.gather import GatheredUpdate, GatherResult
from tplr.files import atomic_writer
from tplr.keys import gradient_key, state_key
from tplr.node.elector import Elector, closes_after
from tplr.node.leader import Leader
from tplr.node.own_aggregates import OwnAggregates
from tplr.node.windows import WindowUpdates
from tplr.scale.sizes import run_constants
from tplr.schemas import PeerList, Reason
from tplr.storage import ObjectStore
from tplr.storage.retry import with_retry
from tplr.training.model import build_model
from tplr.training.schemes import outer_scheme

pytestmark = pytest.mark.timeout(180)

VALIDATORS = ("validator", "validator-2", "validator-3")


@pytest.mark.parametrize(("size", "seconds"), [(2**20, 1.0), (100 * 2**20, 100.0), (2 * 2**30, 600.0)])
def test_an_election_begins_after_the_slowest_transfer_but_within_half_a_window(size: int, seconds: float) -> None:
    hparams = run_constants("70B", time_window_delta_seconds=300)
    assert closes_after(hparams, size, 12.0) == 300 + 2 + 2 + seconds


async def test_votes_on_windows_of_long_ago_are_deleted(tmp_path: Path) -> None:
    elector = object.__new__(Elector)
    elector._folder, elector._aggregates = tmp_path, OwnAggregates(None, None, tmp_path)  # type: ignore[arg-type]
    for name in ("election-7", "election-8", "election-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ballot").touch()
    (tmp_path / "window-7-3-abc").touch()
    await elector._forget_before(8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["election-8", "election-x"]


async def test_stored_updates_are_found_beside_what_a_killed_process_left(tmp_path: Path) -> None:
    def parsed(_: int, uid: int, body: bytes) -> GatheredUpdate[Any]:
        return GatheredUpdate(uid, None, hashlib.sha256(body).hexdigest(), len(body))

    windows = SimpleNamespace(parsed=parsed)
    stored = OwnAggregates(None, windows, tmp_path)  # type: ignore[arg-type]
    for name in ("window-7-3", "window-7-3-4-5-6", "window-7-x-abc", f"window-7-x-{'0' * 64}"):
        (tmp_path / name).touch()
    whole = tmp_path / f"window-7-4-{hashlib.sha256(b'whole').hexdigest()}"
    whole.write_bytes(b"whole")
    with atomic_writer(tmp_path / f"window-7-5-{'0' * 64}") as file:
        file.write(b"ha")
        assert len([*tmp_path.glob("window-7-5-*.tmp")]) == 1
        found = await stored.kept(7)
    assert found is not None
    assert [one.uid for one in found.updates] == [4]


async def test_of_a_decided_set_that_is_stored_in_part_each_update_is_published() -> None:
    published: list[tuple[int, int, bytes]] = []

    async def put_witnessed(*update: Any) -> None:
        published.append(update)

    elector = object.__new__(Elector)
    elector._comms = SimpleNamespace(put_witnessed=put_witnessed)  # type: ignore[assignment]
    stored: list[Any] = [GatheredUpdate(uid, SimpleNamespace(body=b"%d" % uid), f"{uid}" * 64, 1) for uid in (3, 4)]
    included = IncludedSet(
        window=7,
        version="1",
        included=tuple(Included(uid=uid, sha256=f"{uid}" * 64, size=1) for uid in (4, 5)),
        skipped={},
        success_rate=1.0,
    )
    await elector._publish_stored(included, GatherResult(window=7, updates=tuple(stored), skipped={}))
    assert published == [(7, 4, b"4")]


class Council:
    """Three electors, a miner that uploads, and a miner that does not."""

    def __init__(self, stage: Any, contexts: dict[str, Any], start: int) -> None:
        self.stage = stage
        self.contexts = contexts
        self.start = start
        model = build_model(stage.hparams)
        self._sender = outer_scheme(dict(model.named_parameters()), stage.hparams)
        self.spec = self._sender.spec

    def electors(self, *names: str) -> list[Any]:
        hparams = self.stage.hparams
        made = []
        for name in names:
            context, folder = self.contexts[name], self.stage.folder(name)
            elector = Elector(context, hparams, self.spec, folder, leader=Leader(context, hparams, folder))
            made.append(elector.run(self.start))
        return made

    async def upload(self) -> int:
        """Upload an update of the next window, in time; return the window."""
        comms = self.contexts["miner-1"].comms
        window = await comms.clock.wait_for_window(comms.clock.window + 1)
        body = self._packed(window, comms.uid)
        await comms.put_commit(window, hashlib.sha256(body).hexdigest())
        await comms.clock.wait_for_window(window + 1)
        await asyncio.sleep(1.0)
        await comms.put_update(window, body)
        return window

    def _packed(self, window: int, uid: int) -> bytes:
        model = build_model(self.stage.hparams)
        tensors = {name: torch.randn(one.shape) for name, one in model.named_parameters()}
        return self._sender.pack(tensors, step=0, window=window, uid=uid, pages_digest="0" * 64, batches=1)

    async def decided(self, window: int, reader: str = "miner-2") -> IncludedSet:
        """Return the decision that a reader without a vote finds."""
        async with asyncio.timeout(60):
            while True:
                if found := await self.contexts[reader].comms.get_included(window):
                    return found
                await asyncio.sleep(0.2)

    async def aggregated(self, included: IncludedSet) -> set[str]:
        """Return the validators that have published the set's aggregate, as soon as they have more than half of the
        stake."""
        async with asyncio.timeout(30):
            while True:
                found = {name for name in VALIDATORS if await self.contexts[name].comms.own_aggregate(included)}
                comms = self.contexts["miner-2"].comms
                if comms.electors.outweighs(self.contexts[name].comms.uid for name in found):
                    return found
                await asyncio.sleep(0.2)


@pytest.fixture
async def council(staged: Any) -> Any:
    # An upload may take five seconds, because the machine may be busy.
    constants = {"relay_seconds": 0.8, "manifest_timeout_seconds": 1.0, "time_window_delta_seconds": 5}
    async with staged(2, validators=3, **constants) as stage:
        names = (*VALIDATORS, "miner-1", "miner-2")
        contexts = {name: await stage.context(stage.setup(name)) for name in names}
        for context in contexts.values():
            await context.comms.refresh()
        async with stage.running(*(context.clock.run() for context in contexts.values())):
            clock = contexts["miner-1"].clock
            await clock.wait_for_block(1)
            start = clock.window + 1
            uids = tuple(contexts[name].comms.uid for name in ("miner-1", "miner-2"))
            listed = PeerList(peers=uids, initial_selection=True, sync_window=start, first_effective_window=start)
            for name in VALIDATORS:
                await contexts[name].comms.post_peer_list(listed)
            yield Council(stage, contexts, start)


async def test_three_decide_alike_and_two_go_on_without_the_third(council: Council) -> None:
    uploader, absent = (council.contexts[name].comms.uid for name in ("miner-1", "miner-2"))
    async with council.stage.running(*council.electors(*VALIDATORS)) as tasks:
        window = await council.upload()
        found = await council.decided(window)
        assert ([one.uid for one in found.included], found.skipped) == ([uploader], {str(absent): Reason.MISSING})
        for name in VALIDATORS:
            assert await council.decided(window, name) == found
        # Electors with more than half of the stake have its updates in one object.
        miner = council.contexts["miner-2"].comms
        await council.aggregated(found)
        windows = WindowUpdates(miner, council.stage.hparams, council.spec)
        applied = await windows.of(window)
        assert ([one.uid for one in applied.updates], applied.published) == ([uploader], True)
        # An update that one elector has witnessed is found, even if no other bucket has it.
        elector, uploads = council.contexts["validator-2"].comms, council.contexts["miner-1"].comms.own_store
        await elector.put_witnessed(window, uploader, applied.updates[0].update.body)
        await uploads.delete(gradient_key(window, uploader, council.stage.hparams.version))
        for name in VALIDATORS:
            store = council.contexts[name].comms.own_store
            await store.delete(state_key("aggregator", window, 0, council.stage.hparams.version))
        again = await windows.from_set(found)
        assert again
        assert [one.sha256 for one in again.updates] == [one.sha256 for one in applied.updates]
        # The largest validator stops answering.
        tasks[0].cancel()
        window = await council.upload()
        found = await council.decided(window)
        assert [one.uid for one in found.included] == [uploader]


async def published_anew(store: ObjectStore, key: str, body: bytes) -> None:
    """Publish again; a store accepts one write per second of a key."""
    await with_retry(lambda: store.put(key, body), deadline_seconds=10)


async def test_what_was_decided_can_be_followed_whatever_one_elector_and_the_miners_delete(council: Council) -> None:
    """One honest elector among its publishers is enough, and an attacker with less than half of the stake is not all of
    them."""
    miner, uploader = council.contexts["miner-2"].comms, council.contexts["miner-1"].comms
    windows = WindowUpdates(miner, council.stage.hparams, council.spec)
    async with council.stage.running(*council.electors(*VALIDATORS)):
        window = await council.upload()
        found = await council.decided(window)
        published = await council.aggregated(found)
    assert len(published) == 2  # two of three: no more than needed
    key = state_key("aggregator", window, 0, council.stage.hparams.version)
    await uploader.own_store.delete(gradient_key(window, uploader.uid, council.stage.hparams.version))
    for name in published:
        store = council.contexts[name].comms.own_store
        body = await store.get(key, max_bytes=10**9)
        for bad in (None, b"\0" * len(body)):  # deleted, or replaced by one of the same size
            await (store.delete(key) if bad is None else published_anew(store, key, bad))
            again = await windows.from_set(found)
            assert again
            assert [one.sha256 for one in again.updates] == [one.sha256 for one in found.included]
        await published_anew(store, key, body)
    # Only all of them together can: then a node that missed the window uses a checkpoint, as after any long absence.
    for name in published:
        await council.contexts[name].comms.own_store.delete(key)
    with pytest.raises(WindowLost):
        await windows.from_set(found)

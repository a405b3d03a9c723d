"""The content of a hostile node's bucket for readers, by its behaviour in a window."""

import asyncio
from functools import partial

import pytest
import torch

from tplr.chain.electors import Elector, Electors
from tplr.chain.hotkeys import new_hotkey, sign
from tplr.errors import ObjectNotFound
from tplr.exchange.aggregates import Included, IncludedSet
from tplr.exchange.ballots import BallotReader, Echo, Proposal, Relay, Value, Vote, value_id
from tplr.exchange.checkpoints import Checkpoint, fetch, publish
from tplr.exchange.envelope import Run, Signer, body_of, open_document, sign_document
from tplr.exchange.snapshot import (
    MANIFEST,
    ShardWriter,
    SnapshotManifest,
    SnapshotReader,
    check_shards,
    read_manifest,
    write_manifest,
)
from tplr.keys import (
    checkpoint_prefix,
    debug_key,
    decision_key,
    echo_key,
    included_key,
    start_window_key,
    status_key,
    vote_key,
)
from tplr.localnet.accounts import key_table, new_account
from tplr.localnet.attackers.forgery import BEHAVIOURS, behaviour
from tplr.localnet.attackers.hostile_store import HANG_SECONDS, OTHER, HostileStore, Plot, window_of
from tplr.localnet.attackers.nan_checkpoint import write_nan_shards
from tplr.localnet.attackers.sealing import Sealer
from tplr.schemas import DebugReport, StartWindow
from tplr.storage import S3Connections
from tplr.testing.s3server import Rules, serve

SEED = 3
RUN = Run(3, "1")
HOTKEY = new_hotkey()
ME = Signer(RUN, 4, HOTKEY.ss58_address, partial(sign, HOTKEY))
SIGNING = Sealer(RUN, ME.hotkey, ME.sign)
BARE = Sealer(RUN, "", None)


def window_with(wanted):
    """Return a window in which a hostile node has this behaviour."""
    return next(window for window in range(len(BEHAVIOURS)) if behaviour(SEED, window) == wanted)


@pytest.fixture
async def world(tmp_path):
    """A hostile bucket and its readers."""
    account = new_account()
    faults = tmp_path / "faults.json"
    faults.write_text("[]")
    told = []
    plot = Plot(SEED, faults, hang_seconds=0.5, on_attack=lambda *one: told.append(one))
    serving = serve(tmp_path / "s3", key_table([account]), faults=faults, rules=Rules(one_write_per_second=False))
    async with serving as server, S3Connections(server.endpoint) as connections:
        store = HostileStore(connections.store(account.writable).client, plot, SIGNING)
        yield store, connections.store(account.readable), told


def report(window):
    document = DebugReport(
        window=window,
        uid=4,
        fingerprint="a" * 64,
        outer_fingerprint="e" * 64,
        proof="b" * 64,
        digest="",
        included={"1": "d" * 64},
        skipped={},
    )
    return debug_key(window, 4, "1"), sign_document(document, window=window, signer=ME)


@pytest.mark.parametrize(
    ("key", "window"),
    [
        (included_key(17, "1"), 17),
        (debug_key(17, 4, "1"), 17),
        (checkpoint_prefix(17, 4, "1") + MANIFEST, 17),
        (vote_key(17, 3, "1"), 17),
        (echo_key(17, 2, 3, "1"), 17),
        (status_key(17, 2, 3, "1"), 17),
        (decision_key(17, "1"), 17),
        (vote_key(None, 3, "1"), 0),
        (echo_key(None, 2, 3, "1"), 0),
        (decision_key(None, "1"), 0),
        ("peers_17_v1.json", 17),
        (start_window_key("1"), 0),
    ],
)
def test_the_window_of_an_object(key, window):
    assert window_of(key) == window


async def read(store, key):
    return await store.get(key, max_bytes=2**25)


async def test_an_honest_window(world):
    mine, theirs, told = world
    key, body = report(window_with("honest"))
    await mine.put(key, body)
    assert await read(theirs, key) == body
    assert told == []


@pytest.mark.parametrize("how", ["false-set", "false-fingerprint", "bomb"])
async def test_a_forged_document(world, how):
    mine, theirs, told = world
    key, body = report(window_with(how))
    await mine.put(key, body)
    found = await read(theirs, key)
    assert found != body
    if how == "false-fingerprint":
        opened = open_document(found, DebugReport, window=window_with(how), author=ME)
        assert opened.document.fingerprint != "a" * 64
    assert told == [(window_with(how), how, key)]


async def test_silence(world):
    mine, theirs, _ = world
    key, body = report(window_with("silent"))
    await mine.put(key, body)
    with pytest.raises(ObjectNotFound):
        await theirs.head(key)


async def test_two_readers_see_two_documents(world):
    mine, theirs, _ = world
    key, body = report(window_with("equivocate"))
    await mine.put(key, body)
    found = [await read(theirs, key) for _ in range(4)]
    assert found[::2] == [body, body]
    assert found[1] == found[3] == await read(theirs, key + OTHER) != body


async def test_a_bucket_that_hangs_answers_again(world):
    mine, theirs, _ = world
    key, body = report(window_with("hang"))
    await mine.put(key, body)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await read(theirs, key)
    assert HANG_SECONDS > 30
    await asyncio.sleep(0.5)
    async with asyncio.timeout(5):
        assert await read(theirs, key) == body


async def test_an_aggregate_is_noise(world):
    mine, theirs, _ = world
    key = f"aggregator-{window_with('false-set')}-v1.safetensors"
    await mine.put(key, bytes(100))
    found = await read(theirs, key)
    assert len(found) == 100
    assert found != bytes(100)


async def test_what_is_no_document_is_left_as_it_is(world):
    mine, theirs, told = world
    await mine.put("write-probe", b"1")
    assert await read(theirs, "write-probe") == b"1"
    assert told == []


def snapshot(folder, window):
    writer = ShardWriter(folder)
    writer.write({"weights": torch.ones(3, 4), "steps": torch.ones(2, dtype=torch.int64)})
    manifest = SnapshotManifest(
        window=window,
        start_window=1,
        global_step=2,
        version="1",
        values={},
        tensors=writer.tensors,
        shards=tuple(writer.shards),
    )
    write_manifest(folder, manifest)
    return manifest


def test_a_checkpoint_of_nan_is_whole(tmp_path):
    manifest = snapshot(tmp_path / "true", 5)
    (tmp_path / "false").mkdir()
    false = write_nan_shards(tmp_path / "false", manifest)
    write_manifest(tmp_path / "false", false)
    found = read_manifest(tmp_path / "false")
    check_shards(tmp_path / "false", found, found.shards)
    target = torch.zeros(3, 4)
    SnapshotReader(tmp_path / "false", found).read_into("weights", target)
    assert target.isnan().all()
    assert found.tensors == manifest.tensors


async def test_a_published_checkpoint_becomes_one_of_nan(world, tmp_path):
    """It is signed by its author, and every digest matches."""
    mine, theirs, told = world
    window = window_with("false-set")
    manifest = snapshot(tmp_path / "true", window)
    await publish(mine, tmp_path / "true", signer=ME, keep_last=2)
    checkpoint = Checkpoint(theirs, window, ME)
    found = await fetch(checkpoint, tmp_path / "read", wanted=manifest.tensors)
    check_shards(tmp_path / "read", found, found.shards)
    target = torch.zeros(3, 4)
    SnapshotReader(tmp_path / "read", found).read_into("weights", target)
    assert target.isnan().all()
    assert told == [(window, "nan-checkpoint", checkpoint.prefix + MANIFEST)]


def test_a_false_body_is_signed_by_the_node():
    starts = [StartWindow(start_window=window) for window in (5, 6)]
    true, other = (sign_document(one, window=9, signer=ME) for one in starts)
    forged = SIGNING.sealed(true, SIGNING.body(other))
    assert open_document(forged, StartWindow, window=9, author=ME).document == starts[1]
    assert BARE.sealed(b'{"a":1}', b'{"a":2}') == b'{"a":2}'  # a bare document


def test_a_proposer_signs_two_proposals_of_one_slot():
    """Both are well-formed for every elector: only the existence of two reveals the lie."""
    electors = Electors((Elector(4, ME.hotkey, 1),))
    included = IncludedSet(
        window=9,
        version="1",
        included=tuple(Included(uid=uid, sha256=f"{uid:064x}", size=7) for uid in (1, 2)),
        skipped={},
        success_rate=1.0,
    )

    def text(document):
        return sign_document(document, window=9, signer=ME).decode()

    value = Value(included=included, peers=None)
    vote = text(Vote(found={"1": f"{1:064x}", "2": f"{2:064x}"}, missing={}, peers=None))
    votes = {"4": BallotReader(electors, RUN, 9).vote(vote.encode(), 4).sha256}
    relay = Relay(
        echo=text(Echo(slot=0, value=value_id(value))),
        proposal=text(Proposal(slot=0, value=value, votes=votes)),
        votes=(vote,),
        proof=None,
    )
    true = text(relay).encode()
    false = SIGNING.other_proposal(true)
    assert false is not None
    seen = [BallotReader(electors, RUN, 9).relay(raw, 4, 0) for raw in (true, false)]
    assert [[one.uid for one in relay.value.included.included] for relay in seen] == [[1, 2], [2]]
    assert seen[0].id != seen[1].id
    assert SIGNING.other_proposal(vote.encode()) is None
    assert SIGNING.other_proposal(b"{}") is None
    assert body_of(relay) == SIGNING.body(true)

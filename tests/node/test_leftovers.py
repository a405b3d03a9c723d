"""``tplr clean`` lists every run's objects of a bucket, deletes those that are named, and none that may be in use."""

import pytest
from guides import from_guide

from tplr.cli.reported import FAILED
from tplr.errors import StoreUnavailable
from tplr.keys import (
    checkpoint_prefix,
    commit_key,
    debug_key,
    gradient_key,
    page_document_key,
    page_key,
    peers_key,
    probe_key,
    start_window_key,
)
from tplr.localnet.accounts import bucket_variables
from tplr.localnet.network import HOTKEY
from tplr.node import leftovers
from tplr.node.leftovers import DAY_SECONDS, IDLE_DAYS, ObjectGroup, PresentRun
from tplr.schemas import ObjectInfo
from tplr.storage import S3Connections
from tplr.storage.parts import FilePart
from tplr.storage.probe import SPEED_BYTES, probe_speed
from tplr.testing.s3server import Status

WALLET = {"NAME": "miner-1", "HOTKEY": HOTKEY}
LIST = from_guide("docs/miner.md", ".venv/bin/tplr clean --wallet.name NAME --wallet.hotkey HOTKEY", WALLET)
DELETE = from_guide(
    "docs/miner.md",
    ".venv/bin/tplr clean --wallet.name NAME --wallet.hotkey HOTKEY --delete 1/7",
    {**WALLET, "1/7": "77/5"},
)
NOW = 1e9
RUN = PresentRun(versions=frozenset({1, 2}), uid=7, others=frozenset({8}), needed_from=100, shared=False)


def group(version: int | None, uid: int | None, *, window: int = 99, days: float = IDLE_DAYS) -> ObjectGroup:
    key = peers_key(window, str(version)) if uid is None else gradient_key(window, uid, str(version))
    key = probe_key() if version is None else key
    return ObjectGroup(version, uid, [ObjectInfo(key=key, size=1, etag="", last_modified=NOW - days * DAY_SECONDS)])


@pytest.mark.parametrize(
    ("found", "use"),
    [
        (group(1, 7), "of this run"),
        (group(2, 7), "of this run"),  # of an announced upgrade
        (group(1, None), "of this run"),
        (group(1, 8), "uid 8 of this run uses this bucket"),
        (group(1, 9), None),
        (group(1, 9, window=100), "nodes read windows from 100 on"),  # an elector's copy of a miner's update
        (group(1, 9, days=IDLE_DAYS - 0.1), "written to within"),
        (group(0, 7), None),
        (group(0, 8, window=100), None),
        (group(0, None), None),
        (group(0, 9, days=IDLE_DAYS - 0.1), "written to within"),
        (group(None, None), None),
        (group(None, None, days=IDLE_DAYS - 0.1), "written to within"),  # by a test that runs
    ],
)
def test_what_may_be_in_use_is_kept(found: ObjectGroup, use: str | None) -> None:
    said = RUN.use_of(found, now=NOW)
    assert said is None if use is None else said is not None and use in said


def test_in_a_bucket_of_several_nodes_everything_of_this_run_is_kept() -> None:
    shared = PresentRun(versions=RUN.versions, uid=7, others=frozenset(), needed_from=100, shared=True)
    assert "of this run" in str(shared.use_of(group(1, 9), now=NOW))
    assert shared.use_of(group(0, 9), now=NOW) is None


async def test_test_objects_of_a_doctor_that_was_killed(stage, command, capsys, monkeypatch) -> None:
    monkeypatch.setattr(leftovers, "IDLE_DAYS", 0)
    stage.server.faults.add("^DELETE", Status(503, "SlowDown"))
    async with S3Connections(stage.server.endpoint) as connections:
        store = connections.store(stage.setup("miner-1").account.writable)
        with pytest.raises(StoreUnavailable):
            await probe_speed(store, store)
        (left,) = [one for one in await store.list() if one.size == SPEED_BYTES]
        assert await command(*LIST.arguments) == 0
        assert "--delete probes" in capsys.readouterr().out
        assert await command("clean", "--delete", "probes") == 0
        assert left.key not in {one.key for one in await store.list()}


async def test_unfinished_uploads_that_get_no_more_parts(stage, command, capsys, caplog, monkeypatch) -> None:
    body = stage.network.folder / "part"
    body.write_bytes(b"12345" * 10**6)
    async with S3Connections(stage.server.endpoint) as connections:
        store = connections.store(stage.setup("miner-1").account.writable)
        for key in (checkpoint_prefix(3, 5, "77") + "shard-00000-00012.safetensors", "mine/x"):
            upload_id = await store.multipart.create(key)
            await store.multipart.put_part(key, upload_id, FilePart(1, 0, 5 * 10**6), body)
        assert await command(*LIST.arguments) == 0
        assert "recent-uploads" in capsys.readouterr().out
        for name, why in (("uploads", "no such group"), ("recent-uploads", "it is kept: written to within 3 days")):
            assert await command("clean", "--delete", name) == FAILED
            assert f"--delete {name}: " in caplog.text
            assert why in caplog.text
        assert len(await store.multipart.unfinished()) == 2
        monkeypatch.setattr(leftovers, "IDLE_DAYS", 0)
        assert await command(*LIST.arguments) == 0
        assert "0.01" in capsys.readouterr().out  # GB, rounded
        assert await command("clean", "--delete", "uploads") == 0
        assert "uploads: 1 aborted" in capsys.readouterr().out
        assert [upload.key for upload in await store.multipart.unfinished()] == ["mine/x"]


async def test_pages_of_former_runs(stage, command, capsys, monkeypatch) -> None:
    account, now = stage.setup("miner-1").account, str(stage.hparams.spec_version)
    for name, value in bucket_variables("page", account, "read", "write").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(leftovers, "IDLE_DAYS", 0)
    async with S3Connections(stage.server.endpoint) as connections:
        store = connections.store(account.writable)
        for key in (page_key("77"), page_document_key("77"), page_key(now)):
            await store.put(key, b"12345")
        assert await command("clean", "--bucket", "page", "--delete", f"{now}/-") == FAILED
        assert await command("clean", "--bucket", "page", "--delete", "77/-") == 0
        assert "77/-: 2 objects deleted" in capsys.readouterr().out
        assert [one.key for one in await store.list()] == [page_key(now)]


async def test_only_the_named_groups_are_deleted(stage, command, capsys, caplog, monkeypatch) -> None:
    account, now = stage.setup("miner-1").account, str(stage.hparams.spec_version)
    uid = (await stage.context(stage.setup("miner-1"))).comms.uid
    former = "77"
    left = {checkpoint_prefix(3, 5, former) + "manifest.json", gradient_key(3, 5, former), commit_key(4, 5, former)}
    kept = {
        debug_key(3, 6, former),
        start_window_key(former),
        gradient_key(3, uid, now),
        "gradient-notes.txt",
        "mine/x",
    }
    async with S3Connections(stage.server.endpoint) as connections:
        store = connections.store(account.writable)
        for key in left | kept:
            await store.put(key, b"12345")
        assert await command(*LIST.arguments) == 0
        said = capsys.readouterr().out
        assert f"{now}/{uid}" in said
        assert "77/5" in said
        assert "3 to 4" in said
        assert await command("clean", "--delete", "77/5", "76/5") == FAILED
        assert "--delete 76/5: the bucket has no such group" in caplog.text
        assert "--delete 77/5: it is kept: written to within 3 days" in caplog.text
        monkeypatch.setattr(leftovers, "IDLE_DAYS", 0)
        assert await command("clean", "--delete", f"{now}/{uid}", "77/5") == FAILED
        assert f"--delete {now}/{uid}: it is kept: of this run" in caplog.text
        assert {one.key for one in await store.list()} == left | kept
        capsys.readouterr()
        assert await command(*DELETE.arguments) == 0
        assert "77/5: 3 objects deleted" in capsys.readouterr().out
        assert {one.key for one in await store.list()} == kept

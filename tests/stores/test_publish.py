"""Datasets and token stores are uploaded to a bucket: manifest last, existing objects once, nothing mixed."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tplr.errors import AccessDenied, ConfigError, DataError, ObjectNotFound, StoreError
from tplr.pages.build import write_dataset
from tplr.pages.fetch_manifest import fetch_manifest
from tplr.storage import parts, upload_file
from tplr.storage.replicas import Replicas
from tplr.stores.bucket import list_shards
from tplr.stores.expected_files import local_prefix
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.pipeline import prepare
from tplr.stores.publish import digests_of, publish
from tplr.stores.verify import verify
from tplr.testing.s3server import LoseResponse, Status

MANIFESTS = ["/books/sub/set/_metadata.yaml", "/books/sub/set/_shard_sizes.json"]


def build(folder: Path, text: str = "row") -> Path:
    with write_dataset(folder, rows_per_group=10, rows_per_shard=50) as writer:
        for config in ("one", "two"):
            writer.add(config, [f"{config} {text} {i}" for i in range(102)])
    return folder


@pytest.fixture
def dataset(tmp_path):
    return build(tmp_path / "dataset")


def written(served) -> list[str]:
    return [request.removeprefix("PUT ").partition("?")[0] for request in served.seen("PUT")]


async def test_everything_arrives_and_the_manifest_comes_last(served, dataset):
    told = []
    done = await publish(dataset, served.store, "sub/set", progress=lambda *bytes: told.append(bytes))
    assert (done.sent, done.skipped) == (8, 0)
    assert written(served)[-2:] == MANIFESTS
    assert len(written(served)) == 8
    total = sum(path.stat().st_size for path in dataset.rglob("*") if path.is_file())
    assert told[-1] == (total, total)
    assert told == sorted(told)
    manifest = await fetch_manifest(Replicas([served.store]), "sub/set")
    assert {config.num_rows for config in manifest.configs.values()} == {102}
    assert (await verify(served.store, "sub/set")).problems == ()


async def test_what_is_there_is_not_sent_again(served, dataset):
    await publish(dataset, served.store, "sub/set")
    before = len(written(served))
    assert (await publish(dataset, served.store, "sub/set")).skipped == 8
    assert len(written(served)) == before
    # Same size, other bytes; and a deleted object.
    damaged = bytearray((dataset / "one/train-00001.parquet").read_bytes())
    damaged[99] ^= 1
    await served.store.put("sub/set/one/train-00001.parquet", bytes(damaged))
    await served.store.delete("sub/set/two/train-00002.parquet")
    done = await publish(dataset, served.store, "sub/set")
    assert (done.sent, done.skipped) == (2, 6)
    assert (await verify(served.store, "sub/set")).problems == ()


async def test_an_upload_that_ended_early_goes_on_and_looked_like_nothing(served, dataset):
    served.server.faults.add(r"^PUT .*/two/train-00001", Status(403, "AccessDenied"))
    with pytest.raises(AccessDenied):
        await publish(dataset, served.store, "sub/set")
    assert not {*written(served)} & {*MANIFESTS}
    there = {info.key for info in await served.store.list()}
    assert there
    with pytest.raises(ObjectNotFound):
        await fetch_manifest(Replicas([served.store]), "sub/set")
    done = await publish(dataset, served.store, "sub/set")
    assert done.skipped == len(there)
    assert done.sent == 8 - len(there)
    assert (await verify(served.store, "sub/set")).problems == ()


async def test_faults_on_the_way_are_survived(served, dataset):
    served.server.faults.add(r"^PUT .*/one/train-00000", LoseResponse())
    served.server.faults.add(r"^PUT .*_shard_sizes", Status(503, "SlowDown"))
    served.server.faults.add(r"^GET /books\?", Status(500))
    await publish(dataset, served.store, "sub/set")
    assert (await verify(served.store, "sub/set")).problems == ()


async def test_another_version_is_replaced_only_when_asked_for_and_never_mixed(served, dataset, tmp_path):
    await publish(dataset, served.store, "sub/set")
    other = build(tmp_path / "other", text="line")
    before = len(served.requests)
    with pytest.raises(ConfigError, match=r"_shard_sizes.json belongs to another dataset or version than .*--replace"):
        await publish(other, served.store, "sub/set")
    assert not [request for request in served.requests[before:] if not request.startswith("GET")]
    before = len(served.requests)
    await publish(other, served.store, "sub/set", replace=True)
    changes = [request for request in served.requests[before:] if not request.startswith(("GET", "HEAD"))]
    assert changes[0].startswith("DELETE /books/sub/set/_shard_sizes.json")
    assert changes[-1].startswith("PUT /books/sub/set/_shard_sizes.json")
    found = await verify(served.store, "sub/set")
    assert (found.problems, found.unlisted) == ((), ())


async def test_large_files_go_on_within_their_parts(served, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MIN_PART_BYTES", 5 * 2**20)  # R2's minimum
    data = b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(380_000))  # three parts
    folder = store_of(tmp_path / "store", {"sequence.bin": data})
    # Two parts remain, as after a kill: the third is refused, and so is the following abort.
    served.server.faults.add(r"^PUT .*partNumber=3", Status(403, "AccessDenied"))
    served.server.faults.add(r"^DELETE ", Status(403, "AccessDenied"))
    with pytest.raises(AccessDenied):
        await upload_file(served.store, "tokens/sequence.bin", folder / "sequence.bin", concurrency=1)
    assert len(served.seen("PUT", "partNumber")) == 3
    assert (await publish(folder, served.store, "tokens")).sent == 2
    assert len(served.seen("PUT", "partNumber")) == 4
    assert (await publish(folder, served.store, "tokens")).skipped == 2
    assert (await verify(served.store, "tokens")).problems == ()


def store_of(folder: Path, files: dict[str, bytes]) -> Path:
    """A token store of one shard: files of bytes, and their ``meta.json``."""
    folder.mkdir(parents=True)
    keys, listed = {}, []
    for name, data in files.items():
        (folder / name).write_bytes(data)
        keys[name.removesuffix(".bin")] = {"shape": [len(data)], "dtype": "uint8"}
        digest = hashlib.sha256(data).hexdigest()
        blocks = [hashlib.sha256(data[at : at + 2**24]).hexdigest() for at in range(0, len(data), 2**24)]
        listed.append({"path": name, "bytes": len(data), "sha256": digest, "blocks": blocks})
    whole = {"format": "bin", "version": 1, "total_tokens": 1, "records": 0, "block_bytes": 2**24, "files": listed}
    (folder / "meta.json").write_text(json.dumps({**keys, "_store": whole}))
    return folder


async def test_token_stores_are_published_alike(served, tmp_path):
    for shard in ("shard_0000", "shard_0001"):
        store_of(tmp_path / "store" / shard, {"ids.bin": shard.encode(), "mask.bin": b"\x01" * 10})
    assert (await publish(tmp_path / "store", served.store, "tokens")).sent == 6
    assert [path.rpartition("/")[2] for path in written(served)][-2:] == ["meta.json", "meta.json"]
    assert (await verify(served.store, "tokens")).problems == ()
    # Fewer shards: shards of the longer version must not remain.
    shutil.rmtree(tmp_path / "store" / "shard_0001")
    with pytest.raises(ConfigError, match=r"shard_0001/meta.json belongs to another"):
        await publish(tmp_path / "store", served.store, "tokens")
    await publish(tmp_path / "store", served.store, "tokens", replace=True)
    found = await verify(served.store, "tokens")
    assert (found.files, found.problems) == (2, ())
    assert found.unlisted == ("shard_0001/ids.bin", "shard_0001/mask.bin")


async def test_a_prepared_store_is_whole_with_its_report(served, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "raw.jsonl").write_text("".join(f'{{"text": "record {i}"}}\n' for i in range(30)))
    config = {"input": {"sections": [{"field": "text"}]}, "preprocessing": {"min_chars": 1}}
    config = PipelineConfig.from_dict(config | {"output": {"max_tokens_per_shard": 100}})
    folder = tmp_path / "store"
    shards = prepare([tmp_path / "raw.jsonl"], folder, config, tmp_path / "tokenizer").shards
    assert len(shards) > 1
    metas = [f"/books/tokens/{path}/meta.json" for path in shards]
    await publish(folder, served.store, "tokens")
    assert sorted(written(served)[-len(metas) :]) == metas
    assert written(served)[0] == "/books/tokens/prepare.json"
    assert len(written(served)) == len({*written(served)})
    found = await verify(served.store, "tokens")
    assert (found.problems, found.unlisted) == ((), ())
    # A whole shard that no report names.
    for name in ("meta.json", "sequence.bin"):
        data = await served.store.get(f"tokens/{next(iter(shards))}/{name}", max_bytes=2**20)
        await served.store.put(f"tokens/extra/{name}", data)
    foreign = "extra/meta.json belongs to no shard of prepare.json"
    assert foreign in (await verify(served.store, "tokens")).problems[0]
    with pytest.raises(DataError, match=foreign):
        await list_shards(Replicas([served.store]), "tokens")
    for name in ("meta.json", "sequence.bin"):
        await served.store.delete(f"tokens/extra/{name}")
    # A missing shard, and one with a meta.json of another version.
    first, second, *_ = shards
    for info in await served.store.list(f"tokens/{first}/"):
        await served.store.delete(info.key)
    meta = await served.store.get(f"tokens/{second}/meta.json", max_bytes=2**20)
    await served.store.put(f"tokens/{second}/meta.json", meta.replace(b" ", b"") + b"\n")
    problems = (await verify(served.store, "tokens")).problems
    assert [problem.partition(":")[0] for problem in problems] == [f"{first}/meta.json", f"{second}/meta.json"]
    (folder / "prepare.json").rename(folder / ".prepare-journal.json")
    with pytest.raises(DataError, match="not finished; repeat tplr data prepare"):
        await publish(folder, served.store, "other")


async def test_the_shards_that_readers_open_are_verified_and_uploaded(served, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "raw.jsonl").write_text("".join(f'{{"text": "record {i}"}}\n' for i in range(30)))
    config = {"input": {"sections": [{"field": "text"}]}, "preprocessing": {"min_chars": 1}}
    config = PipelineConfig.from_dict(config | {"output": {"max_tokens_per_shard": 100}})
    folder = tmp_path / "store"
    first, *_, last = prepare([tmp_path / "raw.jsonl"], folder, config, tmp_path / "tokenizer").shards
    (folder / last).rename(tmp_path / "disk")
    (folder / last).symlink_to(tmp_path / "disk")
    (folder / first / "up").symlink_to(folder)
    shutil.copytree(folder / first, folder / ".hidden", symlinks=True)
    assert (await verify(*local_prefix(folder))).problems == ()
    await publish(folder, served.store, "tokens")
    found = await verify(served.store, "tokens")
    assert (found.problems, found.unlisted) == ((), ())


async def test_an_upload_of_a_prepared_store_that_was_interrupted_is_refused(served, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "raw.jsonl").write_text("".join(f'{{"text": "record {i}"}}\n' for i in range(30)))
    config = {"input": {"sections": [{"field": "text"}]}, "preprocessing": {"min_chars": 1}}
    config = PipelineConfig.from_dict(config | {"output": {"max_tokens_per_shard": 100}})
    folder = tmp_path / "store"
    shards = prepare([tmp_path / "raw.jsonl"], folder, config, tmp_path / "tokenizer").shards
    last = sorted(shards)[-1]
    served.server.faults.add(rf"^PUT .*{last}/meta.json", Status(403, "AccessDenied"))
    with pytest.raises(AccessDenied):
        await publish(folder, served.store, "tokens")
    part = last.rpartition("/")[0]

    async def refused(*prefixes: str) -> None:
        for prefix in prefixes:
            with pytest.raises(DataError, match=r"meta.json: is missing"):
                await list_shards(Replicas([served.store]), prefix)

    await refused("tokens", f"tokens/{part}")
    await publish(folder, served.store, "tokens")
    assert len(await list_shards(Replicas([served.store]), "tokens")) == len(shards)
    # Replaces another version with the same first shards.
    with (tmp_path / "raw.jsonl").open("a") as file:
        file.write("".join(f'{{"text": "record {i}"}}\n' for i in range(30, 60)))
    other = tmp_path / "other"
    added = set(prepare([tmp_path / "raw.jsonl"], other, config, tmp_path / "tokenizer").shards) - {*shards}
    served.server.faults.add(rf"^PUT .*{sorted(added)[0]}/", Status(403, "AccessDenied"))
    with pytest.raises(AccessDenied):
        await publish(other, served.store, "tokens", replace=True)
    await refused("tokens")


async def test_a_part_of_a_prepared_store_is_whole_with_the_report_above_it(served, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "raw.jsonl").write_text(
        "".join(f'{{"text": "record {i}", "site": "{"ab"[i % 2]}"}}\n' for i in range(30))
    )
    config = PipelineConfig.from_dict({
        "input": {"sections": [{"field": "text"}]},
        "preprocessing": {"min_chars": 1},
        "output": {"domain_key": "site", "max_tokens_per_shard": 100},
    })  # fmt: skip
    folder = tmp_path / "store"
    prepare([tmp_path / "raw.jsonl"], folder, config, tmp_path / "tokenizer")
    await publish(folder, served.store, "deep/tokens")
    places = [
        lambda part: (served.store, f"deep/tokens/{part}"),
        lambda part: local_prefix(folder / part),
    ]

    async def problems(part: str) -> list[str]:
        return [problem for place in places for problem in (await verify(*place(part))).problems]

    assert await problems("a") == await problems("a/shard_0001") == []
    assert len(await list_shards(Replicas([served.store]), "deep/tokens/a")) == len([*folder.glob("a/shard_*")])
    # A shard of the domain is missing.
    for info in await served.store.list("deep/tokens/a/shard_0001/"):
        await served.store.delete(info.key)
    shutil.rmtree(folder / "a/shard_0001")
    assert await problems("a") == ["shard_0001/meta.json: is missing"] * 2
    assert await problems("b") == await problems("a/shard_0000") == []
    with pytest.raises(DataError, match=r"tokens/a is incomplete: shard_0001/meta.json: is missing"):
        await list_shards(Replicas([served.store]), "deep/tokens/a")
    # A report that the credentials can't read, or that is of another preparation.
    served.server.faults.add(r"/deep/tokens/prepare.json", Status(403, "AccessDenied"))
    assert (await verify(served.store, "deep/tokens/a")).problems == ()
    report = await served.store.get("deep/tokens/prepare.json", max_bytes=2**20)
    await served.store.put("deep/tokens/prepare.json", b'{"recipe": 1}')
    assert (await verify(served.store, "deep/tokens/a")).problems == ()
    # An unfinished preparation.
    await served.store.delete("deep/tokens/prepare.json")
    await served.store.put("deep/tokens/.prepare-journal.json", report)
    (folder / "prepare.json").rename(folder / ".prepare-journal.json")
    found = await problems("b")
    assert len(found) == 2
    assert all("prepare-journal.json: this preparation is not finished" in problem for problem in found)


def shard_missing(folder):
    (folder / "one/train-00000.parquet").unlink()


def shard_short(folder):
    path = folder / "one/train-00000.parquet"
    path.write_bytes(path.read_bytes()[:-1])


def shard_damaged(folder):
    path = folder / "one/train-00000.parquet"
    path.write_bytes(b"X" + path.read_bytes()[1:])


def manifest_half(folder):
    (folder / "_shard_sizes.json").unlink()


def manifest_torn(folder):
    (folder / "_shard_sizes.json").write_text("{")


def nothing(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def bare_store(folder):
    nothing(folder)
    (folder / "meta.json").write_text('{"sequence": {"shape": [3], "dtype": "int32"}}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shard_missing, "one/train-00000.parquet: is missing"),
        (shard_short, "one/train-00000.parquet: has .* bytes, the manifest says"),
        (shard_damaged, r"one/train-00000.parquet: its SHA-256 is \w+, the manifest says"),
        (manifest_half, "_shard_sizes.json is missing"),
        (manifest_torn, "_shard_sizes.json is not JSON"),
        (nothing, "there is no dataset and no token store here"),
        (bare_store, "meta.json has no hashes"),
    ],
)
async def test_a_folder_that_is_not_what_it_says_never_gets_a_manifest(served, dataset, damage, message):
    damage(dataset)
    with pytest.raises(DataError, match=message):
        await publish(dataset, served.store, "sub/set")
    assert not [path for path in written(served) if path in MANIFESTS]


async def test_a_bucket_that_denies_says_so(served, dataset):
    served.server.keys.replace(
        {"b" * 32: {"secret": "c" * 64, "buckets": {"books": "read"}}},
    )
    with pytest.raises(StoreError, match="books"):
        await publish(dataset, served.store, "sub/set")


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1, 2 * 2**20, 5 * 2**20 + 3])
def test_digests_are_those_of_the_upload(tmp_path, monkeypatch, size):
    monkeypatch.setattr(parts, "MIN_PART_BYTES", 2**20)
    data = bytes(i * 7 % 251 for i in range(size))
    (tmp_path / "file").write_bytes(data)
    digests = digests_of(tmp_path / "file")
    md5s = [parts.md5_hex(data[part.start : part.stop]) for part in parts.cut(size)]
    assert (digests.size, digests.sha256) == (size, hashlib.sha256(data).hexdigest())
    assert digests.etags == {parts.md5_hex(data)} | ({parts.multipart_etag(md5s)} if len(md5s) > 1 else set())

"""Preparation reads the same sources as streams: every format and compression, from disk, buckets and HTTP."""

import asyncio
import bz2
import gzip
import json
import lzma
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cbor2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tplr.cli import main
from tplr.data import CheckpointableDataset
from tplr.errors import ConfigError, DataError, StateError
from tplr.stores.preprocess import pipeline, records
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.pipeline import prepare
from tplr.stores.preprocess.records import input_files
from tplr.stores.preprocess.sources import Sources
from tplr.streams.iterator import PipelineContext
from tplr.streams.sources import bytes as pieces
from tplr.streams.sources.source_file import SourceFile

CONFIG = PipelineConfig.from_dict({
    "input": {"sections": [{"field": "text"}]},
    "preprocessing": {"min_chars": 1},
    "output": {"max_tokens_per_shard": 60},
})  # fmt: skip
RECORDS = [{"text": f"{i} " + "words " * (i % 4)} for i in range(40)]
PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def encoded(kind: str) -> bytes:
    if kind == "parquet":
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(RECORDS), sink, row_group_size=7)
        return sink.getvalue().to_pybytes()
    if kind == "cbor":
        return b"".join(map(cbor2.dumps, RECORDS))
    return (
        json.dumps(RECORDS).encode()
        if kind == "json"
        else b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
    )


KINDS = [f"{kind}{packed}" for kind in ("jsonl", "ndjson", "json", "cbor", "parquet") for packed in ("", ".gz")]
KINDS += [f"jsonl{packed}" for packed in PACK if packed not in ("", ".gz")]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same records in a file of each kind."""
    folder = tmp_path_factory.mktemp("raw")
    for name in KINDS:
        kind, _, packed = name.partition(".")
        (folder / f"in.{name}").write_bytes(PACK[f".{packed}" if packed else ""](encoded(kind)))
    return folder


def shards(folder: Path) -> list[str]:
    return [
        shard["meta_sha256"]
        for shard in json.loads((folder / "prepare.json").read_text())["progress"]["shards"].values()
    ]


@pytest.fixture(scope="module")
def reference(raw: Path, tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    done = prepare([raw / "in.jsonl"], tmp_path_factory.mktemp("reference") / "out", CONFIG, tokenizer_path)
    assert len(done.shards) > 4
    return shards(done.folder)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_store_also_after_an_interruption(
    raw: Path, reference: list[str], tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write, written = pipeline.write_shard, []

    def third_ends(*args, **kwargs):
        written.append(1)
        if len(written) == 3:
            raise Interrupted
        return write(*args, **kwargs)

    monkeypatch.setattr(pipeline, "write_shard", third_ends)
    told: list[tuple[int, int]] = []
    run = partial(prepare, [raw / f"in.{name}"], tmp_path / "out", CONFIG, tokenizer_path, batch_size=3)
    with pytest.raises(Interrupted):
        run()
    done = run(on_progress=lambda read, total, _: told.append((read, total)))
    assert (done.counts.read, done.counts.used) == (40, 40)
    assert shards(done.folder) == reference
    size = (raw / f"in.{name}").stat().st_size
    assert told == sorted(told)
    assert told[-1] == (size, size)


@pytest.mark.parametrize("name", ["jsonl", "jsonl.gz", "json", "cbor"])
def test_chunks_after_a_resume_are_those_without_it(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(records, "CHUNK_BYTES", 100)
    monkeypatch.setattr(pieces, "FIRST_PIECE", 10)
    monkeypatch.setattr(pieces, "MAX_PIECE", 10)
    with closing(PipelineContext()) as context:
        sources = Sources([SourceFile(context, str(raw / f"in.{name}"))], tmp_path / "cache")
        found = [*records.chunks(sources, records.RecordPosition(), 1000)]
        assert 5 < len(found) < 20
        for number, chunk in enumerate(found, 1):
            rest = records.chunks(sources, chunk.after(-1), 1000)
            assert [one.bodies for one in rest] == [one.bodies for one in found[number:]]


def test_folders_patterns_and_braces(raw: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    def found(*given: str | Path) -> list[str]:
        return [Path(url).name for url in input_files(given, PipelineContext())]

    assert sorted(found(raw)) == sorted(f"in.{name}" for name in KINDS)
    assert found(f"{raw}/in.jsonl.{{gz,zst}}") == ["in.jsonl.gz", "in.jsonl.zst"]
    assert found(f"{raw}/*.cbor*") == ["in.cbor", "in.cbor.gz"]
    for given, says in [
        (raw / "none.jsonl", "no such file or folder"),
        (f"{raw}/*.txt", "no file matches"),
        ("s3://bucket", "expected files of .jsonl"),
        ("gopher://host/a.jsonl", "Protocol not known: gopher"),
    ]:
        with pytest.raises((ConfigError, DataError), match=says):
            prepare([given], tmp_path / "out", CONFIG, tokenizer_path)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl.gz", gzip.compress(encoded("jsonl"))[:-9], r"a\.jsonl\.gz: ends in the middle of its gz data"),
        ("a.jsonl.zst", b"no such data", r"a\.jsonl\.zst: not valid zst"),
        ("a.cbor", encoded("cbor")[:-3], r"a\.cbor: ends in the middle of the item at byte \d+"),
        ("a.json.gz", gzip.compress(b"[{]"), r"a\.json\.gz is not JSON"),
        ("a.parquet.gz", gzip.compress(encoded("parquet")[:-9]), r"a\.parquet\.gz: damaged or not a parquet file"),
    ],
    ids=["gz", "zst", "cbor", "json", "parquet"],  # the bytes hold a time
)
def test_damaged_files_are_named(tokenizer_path: Path, tmp_path: Path, name: str, data: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=says):
        prepare([tmp_path / name], tmp_path / "out", CONFIG, tokenizer_path)


def test_lines_that_are_too_long_are_malformed_and_chunks_have_few_of_them(
    tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    longest = max(map(len, encoded("jsonl").splitlines(keepends=True)))
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", longest)
    monkeypatch.setattr(records, "CHUNK_BYTES", 3 * longest)
    first = b'{"text": "' + b"x" * 2**17 + b'"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(first + encoded("jsonl")))
    done = prepare([tmp_path / "a.jsonl.gz"], tmp_path / "out", CONFIG, tokenizer_path)
    assert (done.counts.read, done.counts.used) == (41, 40)
    assert f"a.jsonl.gz line 1 is left out: a line of more than {longest} bytes" in caplog.text
    with closing(PipelineContext()) as context:
        sources = Sources([SourceFile(context, str(tmp_path / "a.jsonl.gz"))], tmp_path / "cache")
        found = [*records.chunks(sources, records.RecordPosition(), 1000)]
    assert [body for chunk in found for body in chunk.bodies][1:] == encoded("jsonl").splitlines(keepends=True)
    assert found[-1].offsets[-1] == len(first + encoded("jsonl"))
    assert max(sum(map(len, chunk.bodies)) for chunk in found[1:]) < 4 * longest


def test_text_of_a_parquet_file_that_is_not_utf8_is_named(tokenizer_path: Path, tmp_path: Path) -> None:
    texts = pa.array([b"good", b"bad \xff byte"], pa.binary())
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(2, *texts.buffers()[1:])}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: .*can't decode byte 0xff"):
        prepare([tmp_path / "a.parquet"], tmp_path / "out", CONFIG, tokenizer_path)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """This process can only write files of ``size`` bytes, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("storage_format", ["bin", "h5", "jsonl"])
def test_a_full_disk_is_named_and_the_next_run_resumes(
    tokenizer_path: Path, tmp_path: Path, storage_format: str
) -> None:
    output = {"storage_format": storage_format, "max_tokens_per_shard": 300}
    config = PipelineConfig.from_dict({**CONFIG.to_dict(), "output": output})
    big = tmp_path / "big.jsonl"
    big.write_bytes(encoded("jsonl") + json.dumps({"text": "x" * 2040}).encode())  # in the second shard
    run = partial(prepare, [big], tmp_path / "out", config, tokenizer_path)
    with largest_file(8000), pytest.raises(StateError) as failed:
        run()
    assert f"can't write {tmp_path}/out/__default__/shard_0001: File too large" in str(failed.value)
    assert [path.name for path in (tmp_path / "out/__default__").iterdir()] == ["shard_0000"]
    whole = prepare([big], tmp_path / "whole", config, tokenizer_path)
    assert shards(run().folder) == shards(whole.folder)


def test_no_space_for_a_temporary_copy(raw: Path) -> None:
    dataset = CheckpointableDataset.from_files(raw / "in.parquet.gz")
    with largest_file(500), pytest.raises(OSError, match=r"in\.parquet\.gz was copied there; set TMPDIR: '/"):
        list(dataset)


def test_a_temporary_copy_leaves_half_of_the_free_space(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, usage = (raw / "in.parquet").stat().st_size, shutil.disk_usage(raw)
    dataset = CheckpointableDataset.from_files(raw / "in.parquet.gz")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * size))
    assert list(dataset)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * size - 1))
    says = rf"in\.parquet\.gz: its temporary copy takes more than half of the {2 * size - 1} bytes that are free in /"
    with pytest.raises(DataError, match=says):
        list(dataset)


@pytest.fixture
def web(raw: Path) -> Iterator[str]:
    """A server without ranges."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(raw))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("name", ["jsonl.zst", "parquet", "json"])
def test_over_http(web: str, raw: Path, reference: list[str], tokenizer_path: Path, tmp_path: Path, name: str) -> None:
    url = f"{web}/in.{name}?signature=x"
    assert shards(prepare([url], tmp_path / "out", CONFIG, tokenizer_path).folder) == reference
    (source,) = json.loads((tmp_path / "out/prepare.json").read_text())["sources"]
    assert (source["name"], source["size"]) == (f"in.{name}", (raw / f"in.{name}").stat().st_size)
    assert source["version"]


async def test_from_a_bucket(
    served, raw: Path, reference: list[str], tokenizer_path: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", served.bucket.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", served.bucket.secret_access_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", served.server.endpoint)
    CONFIG.to_file(tmp_path / "c.json")
    for name in ("jsonl.gz", "parquet", "cbor"):
        await served.store.put(f"raw/{name}/in.{name}", (raw / f"in.{name}").read_bytes())
        for given in (f"s3://books/raw/{name}/in.{name}", f"s3://books/raw/{name}/"):
            command = ["data", "prepare", given, "-o", str(tmp_path / name), "-c", str(tmp_path / "c.json")]
            assert await asyncio.to_thread(main, [*command, "--tokenizer", str(tokenizer_path)]) == 0
        assert shards(tmp_path / name) == reference
    # Another object under the same name, of the same size.
    changed = bytearray((raw / "in.cbor").read_bytes())
    changed[-1] ^= 1
    await served.store.put("raw/cbor/in.cbor", bytes(changed))
    capsys.readouterr()
    assert await asyncio.to_thread(main, [*command, "--tokenizer", str(tokenizer_path)]) == 2
    assert "the content of source in.cbor changed" in capsys.readouterr().err

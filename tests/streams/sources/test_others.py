"""Files over HTTP, from a server that disconnects or ignores ranges, and of other schemes by fsspec."""

import bz2
import gzip
import io
import json
import logging
import lzma
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import cbor2
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from urllib3.exceptions import HTTPError

from tplr.data import CheckpointableDataset
from tplr.errors import ConfigError, DataError
from tplr.streams.sources import others
from tplr.streams.testing import check_resume

ROWS = [{"id": i, "text": "x" * (i % 50)} for i in range(2000)]
JSONL = b"".join(b'{"id": %d, "text": "%s"}\n' % (row["id"], row["text"].encode()) for row in ROWS)


class Handler(BaseHTTPRequestHandler):
    """Serves ranges; the first answers break off after the numbers of bytes in ``breaks``. ``ignores_ranges`` sends the
    whole file instead."""

    breaks: ClassVar[list[int]] = []
    ranges: ClassVar[list[str]] = []
    ignores_ranges: ClassVar[bool] = False
    etag: ClassVar[str] = ""
    body: ClassVar[bytes] = JSONL

    def do_GET(self) -> None:
        whole = self.body
        asked = None if self.ignores_ranges else self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        self.ranges.append(asked or "")
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(whole) - start))
        if self.etag:
            self.send_header("ETag", self.etag)
        if not self.ignores_ranges:
            self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
        self.end_headers()
        body = whole[start:]
        self.wfile.write(body[: self.breaks.pop(0)] if self.breaks else body)
        self.close_connection = True

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr(others, "FIRST_FETCHED", 5000)
    monkeypatch.setattr(others, "MAX_FETCHED", 5000)
    monkeypatch.setattr(others, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(Handler, "breaks", [])
    monkeypatch.setattr(Handler, "ranges", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/a.jsonl"
    server.shutdown()
    server.server_close()


def test_resumes_at_a_byte(url):
    dataset = CheckpointableDataset.from_files(url)
    assert check_resume(dataset, places=[0, 1500, 2001], limit=3000) == ROWS
    assert any(asked.startswith("bytes=") and asked != "bytes=0-" for asked in Handler.ranges)


def test_a_connection_that_breaks_is_taken_up_where_it_broke(url):
    Handler.breaks[:] = [7000, 20_000, 0]
    assert list(CheckpointableDataset.from_files(url)) == ROWS
    assert len(Handler.ranges) >= 3


@pytest.mark.parametrize("kind", ["jsonl", "json", "cbor", "parquet", "jsonl.gz", "cbor.gz"])
def test_after_a_failed_read_the_next_call_tries_again(url, monkeypatch, kind):
    name, _, packed = kind.partition(".")
    data = {"json": json.dumps(ROWS).encode(), "cbor": b"".join(map(cbor2.dumps, ROWS)), "parquet": parquet(ROWS)}
    body = data.get(name, JSONL)
    monkeypatch.setattr(Handler, "body", gzip.compress(body, 1) if packed else body)
    monkeypatch.setattr(others, "FIRST_FETCHED", 1100)
    monkeypatch.setattr(others, "MAX_FETCHED", 1100)
    Handler.breaks[:] = [0, 4000, 0, 6000]
    dataset = CheckpointableDataset.from_files(url.replace("a.jsonl", f"a.{kind}"), timeout=0.001)
    found: list[dict] = []
    states = []
    with dataset.iter() as samples:
        while len(states) < 5:
            try:
                found += samples
                break
            except (OSError, DataError, HTTPError):
                states.append((len(found), samples.state_dict()))
    assert found == ROWS
    assert states
    for number, state in states:
        assert list(dataset.iter(state)) == ROWS[number:]


def test_without_ranges_a_resume_reads_from_the_start_and_warns(url, monkeypatch, caplog):
    monkeypatch.setattr(Handler, "ignores_ranges", True)
    dataset = CheckpointableDataset.from_files(url)
    with dataset.iter() as samples:
        assert [next(samples) for _ in range(1500)] == ROWS[:1500]
        state = samples.state_dict()
    assert not caplog.records
    with caplog.at_level(logging.WARNING), dataset.iter(state_dict=state) as resumed:
        assert list(resumed) == ROWS[1500:]
    (record,) = caplog.records
    assert url in record.getMessage()


def parquet(rows: list[dict]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=300)
    return sink.getvalue()


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}


@pytest.mark.parametrize("ignores", [False, True], ids=["ranges", "no ranges"])
@pytest.mark.parametrize("kind", ["parquet", "parquet.gz", *(f"jsonl.{packed}" for packed in PACK)])
def test_every_kind_with_and_without_ranges(url, monkeypatch, kind, ignores):
    name, _, packed = kind.partition(".")
    data = parquet(ROWS) if name == "parquet" else JSONL
    monkeypatch.setattr(Handler, "body", PACK[packed](data) if packed else data)
    monkeypatch.setattr(Handler, "ignores_ranges", ignores)
    dataset = CheckpointableDataset.from_files(url.replace("a.jsonl", f"a.{kind}"))
    assert check_resume(dataset, places=[0, 700, 2000], limit=2001) == ROWS


@pytest.mark.parametrize("ignores", [False, True], ids=["ranges", "no ranges"])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_resume_refuses_a_file_that_changed(url, monkeypatch, kind, ignores):
    def serve(rows: list[dict], etag: str) -> None:
        lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        data = parquet(rows) if kind == "parquet" else lines
        monkeypatch.setattr(Handler, "body", gzip.compress(data) if kind.endswith("gz") else data)
        monkeypatch.setattr(Handler, "etag", etag)

    monkeypatch.setattr(Handler, "ignores_ranges", ignores)
    dataset = CheckpointableDataset.from_files(url.replace("a.jsonl", f"a.{kind}"))
    for etag, other in (('"1"', '"2"'), ("", "")):  # a server without ETags shows only another size
        serve(ROWS, etag)
        with dataset.iter() as samples:
            assert [next(samples) for _ in range(700)] == ROWS[:700]
            state = samples.state_dict()
        assert list(dataset.iter(state)) == ROWS[700:]
        serve(ROWS if etag else ROWS[:-1], other)
        with (
            dataset.iter(state) as samples,
            pytest.raises(DataError, match=r"the state was saved in a file of version"),
        ):
            next(samples)


def test_a_resume_refuses_a_file_of_fsspec_that_changed():
    dataset = CheckpointableDataset.from_files("memory://changing/a.jsonl")
    with fsspec.open("memory://changing/a.jsonl", "wb") as file:
        file.write(JSONL)
    with dataset.iter() as samples:
        assert [next(samples) for _ in range(700)] == ROWS[:700]
        state = samples.state_dict()
    assert list(dataset.iter(state)) == ROWS[700:]
    with fsspec.open("memory://changing/a.jsonl", "wb") as file:
        file.write(JSONL[:-200])
    with dataset.iter(state) as samples, pytest.raises(DataError, match=r"memory://changing/a.jsonl: the state was"):
        next(samples)


def test_schemes_of_fsspec(monkeypatch):
    with fsspec.open("memory://corpus/a.jsonl", "wb") as file:
        file.write(JSONL)
    with fsspec.open("memory://corpus/b.jsonl.gz", "wb") as file:
        file.write(gzip.compress(JSONL))
    with fsspec.open("memory://corpus/c.parquet", "wb") as file:
        file.write(parquet(ROWS))
    dataset = CheckpointableDataset.from_files("memory://corpus/*", n_active_shards=1)
    assert check_resume(dataset, places=[0, 1999, 2500, 4001], limit=7000) == ROWS * 3
    with pytest.raises(FileNotFoundError, match=r"memory://corpus/\*.cbor: no file matches"):
        list(CheckpointableDataset.from_files("memory://corpus/*.cbor"))
    with pytest.raises(FileNotFoundError):
        list(CheckpointableDataset.from_files("memory://corpus/none.jsonl"))
    # Schemes that are not installed or not known.
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"gs://bucket/a.jsonl: Please install gcsfs"):
        list(CheckpointableDataset.from_files("gs://bucket/a.jsonl"))
    with pytest.raises(ConfigError, match=r"gopher://host/a.jsonl: Protocol not known: gopher .expected paths, s3://"):
        list(CheckpointableDataset.from_files("gopher://host/a.jsonl"))

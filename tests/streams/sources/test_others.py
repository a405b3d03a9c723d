"""Files over HTTP: read by smart_open, through a server that breaks off or ignores ranges."""

import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from tplr.data import CheckpointableDataset
from tplr.streams.sources import others
from tplr.streams.testing import check_resume

ROWS = [{"id": i, "text": "x" * (i % 50)} for i in range(2000)]
JSONL = b"".join(b'{"id": %d, "text": "%s"}\n' % (row["id"], row["text"].encode()) for row in ROWS)


class Handler(BaseHTTPRequestHandler):
    """Serves ranges; the first answers break off after so many bytes as ``breaks`` says. ``ignores_ranges``
    sends the whole file instead."""

    breaks: ClassVar[list[int]] = []
    ranges: ClassVar[list[str]] = []
    ignores_ranges: ClassVar[bool] = False

    def do_GET(self) -> None:
        asked = None if self.ignores_ranges else self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        self.ranges.append(asked or "")
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(JSONL) - start))
        if not self.ignores_ranges:
            self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(JSONL) - 1}/{len(JSONL)}")
        self.end_headers()
        body = JSONL[start:]
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

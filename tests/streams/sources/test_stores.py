"""Files in a bucket: read in ranges, through faults, from the byte offset of a state; nothing left open."""

import bz2
import gzip
import io
import lzma
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tplr.data import CheckpointableDataset
from tplr.errors import AccessDenied, ConfigError, DataError, ObjectNotFound, StoreUnavailable
from tplr.streams.sources import objects
from tplr.streams.testing import check_resume
from tplr.testing.s3server import Delay, Reset, Status, Truncate

files = CheckpointableDataset.from_files
ROWS = [{"id": i, "text": "x" * (i % 50)} for i in range(300)]
JSONL = b"".join(b'{"id": %d, "text": "%s"}\n' % (row["id"], row["text"].encode()) for row in ROWS)

PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(objects, "FIRST_FETCHED", 1000)
    monkeypatch.setattr(objects, "MAX_FETCHED", 4000)


@pytest.fixture(scope="module")
def filled(running):
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=70)
    packed = {f"some/0.jsonl.{name}": pack(JSONL) for name, pack in PACK.items()}
    running.put({f"some/{i}.jsonl": JSONL for i in range(3)} | packed
                | {"some/0.parquet": sink.getvalue(), "some/0.parquet.gz": gzip.compress(sink.getvalue())})  # fmt: skip


@pytest.fixture
def corpus(filled, remote):
    return remote


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "parquet.gz", *(f"jsonl.{name}" for name in PACK)])
def test_objects_of_each_kind_resume_from_any_record(corpus, kind):
    assert check_resume(files(f"s3://corpus/some/0.{kind}"), places=[70, 300], limit=400) == ROWS


def test_braces_and_globs_over_buckets(corpus):
    expected = [row for row in ROWS for _ in range(3)]
    assert list(files("s3://corpus/some/{0..2}.jsonl")) == list(files("s3://corpus/s**/?.jsonl")) == expected
    with pytest.raises(FileNotFoundError, match="no object matches"):
        files("s3://corpus/some/*.cbor").iter()


def test_a_resume_asks_only_for_what_comes_after(corpus):
    dataset = files("s3://corpus/some/0.jsonl", n_prefetch_samples=0)
    with dataset.iter() as samples:
        for _ in range(290):
            next(samples)
        state = samples.state_dict()
    corpus.requests.clear()
    with dataset.iter(state_dict=state) as samples:
        assert list(samples) == ROWS[290:]
    assert [request.split()[0] for request in corpus.requests] == ["GET"]


@pytest.mark.parametrize(
    "fault", [Status(503), Status(429), Reset(), Truncate(100), Truncate(700, reset=True), Status(500)], ids=repr
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_faults_in_the_middle_lose_and_double_nothing(corpus, fault, kind):
    corpus.server.faults.add(r"^GET .*some/", fault, times=1)
    corpus.server.faults.add(r"^HEAD ", Status(503), times=1)
    with files(f"s3://corpus/some/0.{kind}").iter() as samples:
        assert [next(samples) for _ in range(100)] == ROWS[:100]
        corpus.server.faults.add(r"^GET .*some/", fault, times=1)
        assert list(samples) == ROWS[100:]
        assert samples.report()["retries"] >= 1


def test_a_file_that_stays_away_is_an_error_after_the_timeout_and_may_come_back(corpus):
    with files("s3://corpus/some/0.jsonl", timeout=1, n_prefetch_samples=0).iter() as samples:
        found = [next(samples) for _ in range(10)]
        down = corpus.server.faults.add(r"^GET .*some/", Status(503), times=None)
        with pytest.raises(StoreUnavailable):
            found.extend(samples)
        state = samples.state_dict()
        down.left = 0
        assert found + list(samples) == ROWS
    assert found + list(files("s3://corpus/some/0.jsonl").iter(state_dict=state)) == ROWS


def test_a_changed_object_is_refused(corpus):
    corpus.put({"other.jsonl": JSONL})
    dataset = files("s3://corpus/other.jsonl")
    with dataset.iter() as samples:
        next(samples)
        state = samples.state_dict()
        corpus.put({"other.jsonl": JSONL + b'{"id": 300}\n'})
        with pytest.raises(DataError, match="changed while it was read"):
            list(samples)
    with dataset.iter(state_dict=state) as resumed, pytest.raises(DataError, match="the state was saved in a file"):
        next(resumed)


def test_a_state_fits_a_mirror_with_other_etags_but_not_with_other_sizes(corpus, tmp_path):
    corpus.put({"a/0.jsonl": JSONL, "b/mirror/0.jsonl": JSONL.replace(b" ", b"\t")})
    with files("s3://corpus/a/0.jsonl").iter() as samples:
        first = [next(samples) for _ in range(3)]
        state = samples.state_dict()
    assert first + list(files("s3://corpus/b/mirror/0.jsonl").iter(state_dict=state)) == ROWS
    (tmp_path / "0.jsonl").write_bytes(JSONL)
    assert first + list(files(f"{tmp_path}/0.jsonl").iter(state_dict=state)) == ROWS
    corpus.put({"b/mirror/0.jsonl": JSONL + b"\n"})
    with pytest.raises(DataError, match="the state was saved in a file of version"):
        list(files("s3://corpus/b/mirror/0.jsonl").iter(state_dict=state))


def test_what_is_not_there_and_what_may_not_be_read(corpus, monkeypatch):
    with files("s3://corpus/none.jsonl").iter() as samples, pytest.raises(ObjectNotFound):
        next(samples)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with files("s3://corpus/some/0.jsonl").iter() as samples, pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID"):
        next(samples)


def test_credentials_of_configured_buckets_come_first(corpus, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    for name, value in {
        "TPLR_S3_ENDPOINT": corpus.server.endpoint,
        "R2_DATASET_ACCOUNT_ID": "d" * 32,
        "R2_DATASET_BUCKET_NAME": "corpus",
        "R2_DATASET_READ_ACCESS_KEY_ID": "a" * 32,
        "R2_DATASET_READ_SECRET_ACCESS_KEY": "c" * 64,
    }.items():
        monkeypatch.setenv(name, value)
    assert list(files("r2://corpus/some/0.jsonl")) == ROWS


@pytest.fixture
def no_variables(corpus, monkeypatch, tmp_path):
    """No credentials except those that a test writes into the home folder."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path / ".aws"


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_temporary_credentials(corpus, monkeypatch, kind):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", corpus.temporary_key)
    with files(f"s3://corpus/some/0.{kind}").iter() as samples, pytest.raises(AccessDenied):
        next(samples)
    monkeypatch.setenv("AWS_SESSION_TOKEN", corpus.session_token)
    assert list(files(f"s3://corpus/some/0.{kind}")) == ROWS


def test_a_profile_of_the_home_folder(no_variables, corpus, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_PROFILE", "corpus")
    (no_variables / "config").write_text(f"[profile corpus]\nendpoint_url = {corpus.server.endpoint}\n")
    (no_variables / "credentials").write_text(
        f"[corpus]\naws_access_key_id = {corpus.temporary_key}\naws_secret_access_key = {corpus.secret}\n"
        f"aws_session_token = {corpus.session_token}\n"
    )
    assert list(files("s3://corpus/some/?.jsonl")) == [row for row in ROWS for _ in range(3)]


def test_public_buckets_are_read_without_credentials(no_variables, corpus):
    corpus.put({"0.jsonl": JSONL}, bucket="open")
    assert list(files("s3://open/*.jsonl")) == ROWS
    with files("s3://corpus/some/0.jsonl").iter() as samples, pytest.raises(AccessDenied, match="no credentials were"):
        next(samples)


def test_closing_ends_threads_and_sockets_at_once_also_in_the_middle_of_a_request(corpus):
    before = set(threading.enumerate())

    def started() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    corpus.server.faults.add(r"^GET .*some/[12]", Delay(30), times=None)
    samples = files("s3://corpus/some/{0..2}.jsonl", n_active_shards=1, n_standby_shards=2).iter()
    assert [next(samples) for _ in range(20)] == ROWS[:20]  # of the first file; the next ones are being requested
    while not all(any(f"some/{i}" in request for request in corpus.requests) for i in (1, 2)):
        time.sleep(0.01)
    assert started()
    began = time.monotonic()
    samples.close()
    samples.close()
    assert time.monotonic() - began < 5  # far below the 30 s of the request: close does not wait for it
    assert not started()
    dropped = files("s3://corpus/some/0.jsonl").iter()
    del dropped
    assert not started()

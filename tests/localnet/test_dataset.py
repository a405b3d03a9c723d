"""A corpus that is prepared once, and stored in the form that nodes read."""

import os

import pytest

from tplr.errors import ConfigError
from tplr.localnet.accounts import key_table, new_account
from tplr.localnet.dataset import SUBFOLDER, prepared_corpus, prepared_store, store_shares, upload_dataset
from tplr.localnet.plan import make_plan
from tplr.storage import S3Connections
from tplr.testing.s3server import serve


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(2):
        lines = [f"sentence {number} {i} of a text that is there to be trained on, {i * i}\n" for i in range(4000)]
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def files(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_same_text_is_prepared_once(text, cache):
    first = prepared_corpus(cache, text, 300)
    before = files(cache)
    assert prepared_corpus(cache, text, 300) == first
    assert files(cache) == before
    assert list(cache.iterdir()) == [first]  # no draft was left


def test_another_vocabulary_or_text_is_another_corpus(text, cache, tmp_path):
    first = prepared_corpus(cache, text, 300)
    assert prepared_corpus(tmp_path, text, 301).name != first.name
    changed = text / "0.txt"
    os.utime(changed, ns=(1, 1))
    assert prepared_corpus(tmp_path, text, 300).name != first.name


def test_a_text_that_is_not_fit_leaves_nothing_behind(cache, tmp_path):
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("too little\n")
    with pytest.raises(ConfigError, match="rows"):
        prepared_corpus(tmp_path / "cache", tmp_path / "short", 300)
    assert list((tmp_path / "cache").iterdir()) == []


async def test_the_dataset_is_readable_with_its_read_key(text, cache, tmp_path):
    prepared, account = prepared_corpus(cache, text, 300), new_account("dataset")
    async with serve(tmp_path / "storage", key_table([account])) as server, S3Connections(server.endpoint) as reader:
        await upload_dataset(prepared, account.writable, server.endpoint)
        stored = await reader.store(account.readable).list()
    names = {info.key: info.size for info in stored}
    dataset = prepared / "dataset"
    assert names == {f"{SUBFOLDER}/{path.relative_to(dataset)}": path.stat().st_size for path in dataset.rglob("*.*")}
    assert f"{SUBFOLDER}/_metadata.yaml" in names


async def test_the_token_store_is_prepared_once_and_dealt_out(text, cache, tmp_path):
    prepared, account = prepared_corpus(cache, text, 300), new_account("dataset")
    store = prepared_store(prepared)
    before = files(store)
    assert files(prepared_store(prepared)) == before
    plan = make_plan(miners=2, data="store", run_dir=tmp_path / "run", cache=cache, vocab_size=300)
    shares = store_shares(prepared, plan, 16, 8)
    assert shares["uids"] == 16
    assert shares["samples_per_window"] % 8 == 0
    tokens = sum(path.stat().st_size // 4 for path in store.rglob("sequence.bin"))
    assert 0 < 16 * 16 * shares["samples_per_window"] <= tokens
    with pytest.raises(ConfigError, match="too few for 16 uids"):
        store_shares(prepared, plan, tokens, 8)
    async with serve(tmp_path / "storage", key_table([account])) as server, S3Connections(server.endpoint) as reader:
        await upload_dataset(prepared, account.writable, server.endpoint, data="store")
        stored = {info.key for info in await reader.store(account.readable).list()}
    assert f"{SUBFOLDER}/__default__/shard_0000/sequence.bin" in stored

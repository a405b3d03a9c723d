"""The corpus is built from real files: the standard library, and valid and invalid folders."""

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from tplr.errors import ConfigError
from tplr.localnet.corpus import EOS, build_corpus
from tplr.pages.dataset import PageDataset
from tplr.seeds import PageDraw
from tplr.storage import MemoryStore
from tplr.stores.publish import publish


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return build_corpus(tmp_path_factory.mktemp("default"), vocab_size=1024)


def write_texts(folder, count=300):
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(f"Text {i}\n" + f"of some {i * i} lines\n" * (40 + i % 5))
    return folder


@pytest.mark.long
async def test_pages_of_it_are_real_text(corpus):
    store = MemoryStore()
    await publish(corpus.dataset, store, "folder/inside")
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer)
    dataset = await PageDataset.open([store], "folder/inside", tokenizer)
    assert {config.name: config.num_rows for config in dataset.manifest.configs.values()} == corpus.rows
    assert set(corpus.rows) == {"code", "docs"}
    assert min(corpus.rows.values()) > 1000
    assert dataset.manifest.address == "exact"
    pages = dataset.pages(PageDraw(0, 1), 8)
    batches = await dataset.batches(pages, 8, 128)
    assert len(batches) > 50
    assert batches.max() < 1024
    assert " the " in tokenizer.decode(batches.ravel())


def test_every_config_has_several_shards_of_several_groups_and_true_sizes(corpus):
    sizes = json.loads((corpus.dataset / "_shard_sizes.json").read_text())
    for config, entry in sizes.items():
        assert len(entry["shards"]) >= 2
        assert sum(shard["num_rows"] for shard in entry["shards"]) == entry["total_rows"] == corpus.rows[config]
        for number, shard in enumerate(entry["shards"]):
            data = (corpus.dataset / shard["path"]).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (shard["byte_size"], shard["sha256"])
            footer = pq.read_metadata(pa.BufferReader(data))
            assert footer.num_rows == shard["num_rows"]
            assert footer.num_row_groups >= 3 or number


def test_tokenizer_loses_nothing_and_knows_the_end(corpus):
    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer)
    assert len(tokenizer) == 1024
    assert tokenizer.eos_token == EOS
    text = "def f(x):\n\treturn 'Größe 漢字 \U0001f600'  # \x00"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids
    assert len(tokenizer("    return self")["input_ids"]) < 6


def test_the_same_text_gives_the_same_bytes(tmp_path, monkeypatch):
    source = write_texts(tmp_path / "text")
    built = []
    for name, parallel in (("one", "true"), ("two", "false")):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        build_corpus(tmp_path / name, source=source, vocab_size=300)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        built.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert built[0] == built[1]
    assert len(built[0]) >= 8


def test_all_kinds_of_files_are_read(tmp_path):
    source = write_texts(tmp_path / "text")
    lines = [json.dumps({"text": f"jsonline {i} " + "y" * 400}) for i in range(200)]
    (source / "more.jsonl").write_text("\n".join(lines) + "\n\n")
    pq.write_table(pa.table({"text": [f"parquetrow {i} " + "z" * 400 for i in range(200)]}), source / "most.parquet")
    corpus = build_corpus(tmp_path / "out", source=source, vocab_size=300)
    tables = [pq.read_table(path, columns=["text"]) for path in corpus.dataset.rglob("*.parquet")]
    text = "\n".join(row for table in tables for row in table.column(0).to_pylist())
    assert (text.count("jsonline"), text.count("parquetrow")) == (200, 200)


def folder_missing(source):
    source.rmdir()


def folder_empty(source):
    pass


def nothing_known(source):
    (source / "picture.png").write_bytes(b"\x89PNG")


def too_little(source):
    (source / "a.txt").write_text("short\n")


def no_json(source):
    (source / "a.jsonl").write_text('{"text": "fine"}\n{"text": \n')


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (folder_missing, "no such file or folder"),
        (folder_empty, "no text in it; expected files of .*parquet"),
        (nothing_known, "no text in it"),
        (too_little, "rows of 480 characters, at least 204 are needed"),
        (no_json, "a.jsonl line 2: not JSON"),
    ],
)
def test_unusable_folders_are_explained(tmp_path, prepare, message):
    source = tmp_path / "source"
    source.mkdir()
    prepare(source)
    with pytest.raises(ConfigError, match=message):
        build_corpus(tmp_path / "out", source=source)
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_below_the_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size is 256"):
        build_corpus(tmp_path, vocab_size=256)

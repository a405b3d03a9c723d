"""Documents from files of each kind; every problem is reported with its place, or counted."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tplr.errors import ConfigError
from tplr.pages import texts
from tplr.pages.texts import Documents, split_rows, text_files
from tplr.records import parquet as parquet_reader

TEXT = "Größe 漢字 \U0001f600\r\n\x00 two\n"


def lines(*records) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_every_kind_gives_its_documents(tmp_path):
    records = lines({"text": TEXT, "id": 1}, {"text": "second"})
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    (tmp_path / "b.md").write_bytes(b"\xef\xbb\xbf" + b"with a mark")
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + records.replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(records, mtime=0) + gzip.compress(records))
    (tmp_path / "e.jsonl.zst").write_bytes(zstandard.compress(records))
    (tmp_path / "f.txt.zst").write_bytes(zstandard.compress(TEXT.encode()))
    (tmp_path / "g").mkdir()
    pq.write_table(pa.table({"text": [TEXT, "x"] * 300, "n": range(600)}), tmp_path / "g/1.parquet", row_group_size=7)
    (tmp_path / "z.png").write_bytes(b"\x89PNG")
    files, others = text_files(tmp_path)
    assert [path.name for path in files] == [
        *("a.txt", "b.md", "c.jsonl", "d.jsonl.gz", "e.jsonl.zst", "f.txt.zst", "1.parquet"),
    ]
    assert others == 1
    documents = Documents(files)
    both = [TEXT, "second"]
    assert [*documents] == [TEXT, "with a mark", *both, *both, *both, *both, TEXT, *[TEXT, "x"] * 300]
    assert not documents.skipped
    assert documents.bytes_read == documents.total_bytes == sum(path.stat().st_size for path in files)


def test_another_field_may_hold_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "no", "content": "yes"}))
    pq.write_table(pa.table({"content": pa.array(["large"], pa.large_string())}), tmp_path / "b.parquet")
    assert [*Documents(text_files(tmp_path)[0], field="content")] == ["yes", "large"]


def test_what_holds_nothing_is_counted_and_shifts_nothing(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b" \n\t\n")
    (tmp_path / "c.jsonl").write_bytes(b"\n" + lines({"text": "one"}, {"text": ""}) + b"  \n" + lines({"text": "two"}))
    pq.write_table(pa.table({"text": ["three", "\n", "four"]}), tmp_path / "d.parquet")
    documents = Documents(text_files(tmp_path)[0])
    assert [*documents] == ["one", "two", "three", "four"]
    assert documents.skipped == {"empty file": 1, "empty document": 3, "blank line": 2}


def parquet(table, damage=False) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="none", use_dictionary=False, write_statistics=False, row_group_size=2)
    data = bytearray(sink.getvalue().to_pybytes())
    if damage:
        data[data.index(b"bad row")] = 0xFF
    return bytes(data)


BAD = [
    ("a.jsonl", lines({"text": "good"}) + b'{"text": \n', ["good"], "a.jsonl line 2: not JSON"),
    ("a.jsonl", lines({"text": "good"}) + b"[" * 100_000, ["good"], "line 2: not JSON"),
    ("a.jsonl", lines({"text": "good"}, {"body": "x"}), ["good"], "line 2: expected .* field 'text' .found none"),
    ("a.jsonl", lines({"text": 5}), [], "line 1: expected .* field 'text' .found int"),
    ("a.jsonl", lines(["text"]), [], "line 1: expected a JSON object"),
    ("a.jsonl", lines({"text": "good"}) + b'{"text": "\xff"}\n', ["good"], "line 2: not UTF-8"),
    ("a.jsonl", lines({"text": "\ud800"}), [], "line 1: lone surrogate"),
    ("a.jsonl", lines({"text": "x" * 2000}, {"text": "good"}), ["good"], "line 1: a line of more than 1000 bytes"),
    ("a.jsonl.gz", gzip.compress(lines({"text": "good"}), mtime=0)[:-12], [], "a.jsonl.gz: unreadable or cut off"),
    ("a.jsonl.zst", b"nonsense", [], "a.jsonl.zst: unreadable or cut off"),
    ("a.txt", b"one\ntwo \xe9\n", [], "a.txt line 2: not UTF-8"),
    ("a.txt", b"x" * 1001, [], "a.txt: a text of more than 1000 bytes"),
    ("a.parquet", b"PAR1", [], "a.parquet: unreadable or damaged parquet"),
    ("a.parquet", parquet(pa.table({"body": ["x"], "url": ["y"]})), [], "no column 'text' .only body, url"),
    ("a.parquet", parquet(pa.table({"text": [1]})), [], "column 'text' holds int64, expected text"),
    ("a.parquet", parquet(pa.table({"text": ["good", None, "too"]})), ["good", "too"], "row 2: a row without text"),
    ("a.parquet", parquet(pa.table({"text": ["good", "row", "bad row"]}), damage=True), ["good", "row"], "damaged"),
]


@pytest.mark.parametrize(("name", "data", "good", "message"), BAD)
def test_bad_input_is_named_or_counted(tmp_path, monkeypatch, name, data, good, message):
    monkeypatch.setattr(texts, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(parquet_reader, "BATCH_ROWS", 2)
    (tmp_path / name).write_bytes(data)
    (tmp_path / "z.txt").write_bytes(b"last")
    paths = text_files(tmp_path)[0]
    if b"[" * 1001 in data:
        monkeypatch.setattr(texts, "MAX_RECORD_BYTES", 10**6)
    with pytest.raises(ConfigError, match=message) as caught:
        [*Documents(paths)]
    documents = Documents(paths, skip_bad=True)
    assert [*documents] == [*good, "last"]
    [(reason, count)] = documents.skipped.items()
    assert count == 1
    assert reason in str(caught.value)


def test_folders_without_text_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file or folder"):
        text_files(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"no text in it; expected files of .*parquet"):
        text_files(tmp_path)
    (tmp_path / "a.parquet.gz").write_bytes(b"x")
    with pytest.raises(ConfigError, match="no text in it"):
        text_files(tmp_path / "a.parquet.gz")


@pytest.mark.parametrize("characters", [1, 7, 480])
def test_pieces_lose_no_text_but_blank_ends(characters):
    text = "one\n\n\n  two\n" + "a" * 1000 + "\nthree\n" + "four five six\n" * 100 + "   \n"
    rows = [*split_rows([text, "", "  \n", "last"], characters)]
    assert all(0 < len(row) <= characters for row in rows)
    assert all(row.strip() for row in rows)
    assert "".join("".join(rows).split()) == "".join((text + "last").split())
    assert rows[-1] == "last"[-characters:] or len(rows[-1]) < characters


def test_a_very_long_line_is_cut_in_linear_time():
    rows = [*split_rows(["y" * 4_000_000], 100)]  # would take minutes if every cut copied the rest
    assert (len(rows), {*map(len, rows)}) == (40_000, {100})

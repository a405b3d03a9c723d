"""Files on this machine: their records, their errors, and the position at which a resume continues."""

import bz2
import gzip
import json
import logging
import lzma
import os
import zlib
from pathlib import Path

import cbor2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tplr import urls
from tplr.data import CheckpointableDataset
from tplr.errors import DataError, StateError
from tplr.records import json_list
from tplr.streams.iterator import PipelineContext
from tplr.streams.sources import bytes as pieces
from tplr.streams.sources import records
from tplr.streams.sources.source_file import SourceFile
from tplr.streams.testing import check_resume, same

files = CheckpointableDataset.from_files


def lines(*ids) -> bytes:
    return b"".join(b'{"id": %d}\n' % i for i in ids)


def ids(dataset) -> list[int]:
    return [sample["id"] for sample in dataset]


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces shorter than most lines."""
    monkeypatch.setattr(pieces, "FIRST_PIECE", 3)
    monkeypatch.setattr(pieces, "MAX_PIECE", 5)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n \n"])
def test_lines_longer_than_a_piece_blank_ones_carriage_returns_and_a_byte_order_mark(tmp_path, end):
    text = '{"t": "é\\r"}\r\n\n   \n{"t": "\u2028\u0085"}\n\n{"t": "' + "x" * 40 + '"}'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode() + end)
    found = check_resume(files(str(tmp_path / "a.jsonl")))
    assert found == [{"t": "é\r"}, {"t": "\u2028\u0085"}, {"t": "x" * 40}]


@pytest.mark.usefixtures("small_pieces")
def test_cbor_items_longer_than_a_piece(tmp_path):
    items = [{"id": 1, "b": b"x" * 30}, {"id": 2, "t": ["é", None, 1.5]}, {"id": 3}]
    (tmp_path / "a.cbor").write_bytes(b"".join(map(cbor2.dumps, items)))
    assert check_resume(files(str(tmp_path / "a.cbor"))) == items


@pytest.mark.parametrize(
    ("bad", "says"), [(b"\xa1\x61a\x62\xff\xfe", "at byte 5 is not valid CBOR"), (b"\xa1\x61a\x99\xff", "truncated")],
    ids=["damaged", "truncated"],
)  # fmt: skip
def test_the_rest_of_a_damaged_cbor_file_does_not_count_as_its_end(tmp_path, bad, says):
    whole = cbor2.dumps({"id": 1})
    (tmp_path / "a.cbor").write_bytes(whole + bad + (whole * 3 if "valid" in says else b""))
    with files(str(tmp_path / "a.cbor")).iter() as records:
        assert next(records) == {"id": 1}
        state = records.state_dict()
        for _ in range(3):
            with pytest.raises(DataError, match=says):
                next(records)
            assert same(records.state_dict(), state)


def test_bad_lines_are_left_out_counted_and_bounded(tmp_path, caplog):
    bad = [b"{broken\n", b"[1]\n", b"3\n", b"\xff\xfe\n", b'{"id": 1} {"id": 2}\n', b'{"id": NaN\n']
    good = [lines(i) for i in range(len(bad))]
    (tmp_path / "a.jsonl").write_bytes(b"".join(b for pair in zip(good, bad, strict=True) for b in pair))
    with files(str(tmp_path / "a.jsonl")).iter() as samples, caplog.at_level(logging.WARNING):
        assert [s["id"] for s in samples] == list(range(6))
        assert samples.report() == {
            "samples": 6, "retries": 0, "bad_records": 6, "epoch": 0, "files": 1, "files_ended": 1}  # fmt: skip
        state = samples.state_dict()
    assert "byte 10" in caplog.text
    with files(str(tmp_path / "a.jsonl")).iter(state_dict=state) as resumed:
        assert resumed.report()["bad_records"] == 6
    (tmp_path / "b.jsonl").write_bytes(lines(1) + b"no\n" * 10 + lines(2))
    with pytest.raises(DataError, match="10 lines in a row"):
        ids(files(str(tmp_path / "b.jsonl")))
    (tmp_path / "c.jsonl").write_bytes(b"no\n" * 9 + lines(1) + b"no\n" * 9 + lines(2))
    assert ids(files(str(tmp_path / "c.jsonl"))) == [1, 2]


def test_a_share_of_bad_records_is_limited_also_over_resumes(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [f'{{"id": {i}}}' if i % 5 else "broken" for i in range(1, 301)]  # a fifth is bad
    path.write_text("\n\n".join(rows))
    dataset = files(path, max_bad_fraction=0.2)
    assert len(check_resume(dataset, places=[0, 7, 50, 239], limit=300)) == 240
    with pytest.raises(
        DataError, match=r"a\.jsonl: 20 of 100 records up to the line at byte \d+ .*=0\.199 allows: repair"
    ):
        ids(files(path, max_bad_fraction=0.199))
    # The counts of a file continue where the state was saved.
    with files(path, max_bad_fraction=0.19).iter() as samples:
        for _ in range(70):
            next(samples)
        state = samples.state_dict()
    with pytest.raises(DataError, match="20 of 100 records"):
        list(files(path, max_bad_fraction=0.19).iter(state_dict=state))
    # A short file is checked at its end.
    path.write_text('{"id": 1}\nno\n{"id": 2}\n')
    assert ids(files(path, max_bad_fraction=0.34)) == [1, 2]
    with pytest.raises(DataError, match="1 of 3 records up to the end are not usable"):
        ids(files(path, max_bad_fraction=0.3))
    (tmp_path / "a.json").write_text('[{"id": 1}, 7, {"id": 2}]')
    with pytest.raises(DataError, match="1 of 3 records up to the end"):
        ids(files(tmp_path / "a.json", max_bad_fraction=0.3))


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", "no\nneither\n"), ("a.json", "[1, 2]")])
def test_a_file_in_which_nothing_is_usable(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    (tmp_path / "good.jsonl").write_bytes(lines(1))
    with pytest.raises(DataError, match=f"{name}: not one of its 2 records is usable: the last is not a JSON object"):
        ids(files([tmp_path / "good.jsonl", tmp_path / name]))


@pytest.mark.usefixtures("small_pieces")
def test_json_files(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"id": i} for i in range(9)] + [3, {"id": 9}]))
    (tmp_path / "b.json").write_bytes(b'\xef\xbb\xbf{"id": 10}')
    (tmp_path / "c.ndjson").write_bytes(lines(11))
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(b'[{"id": 12}]'))
    (tmp_path / "e.json").write_text("[]")
    dataset = files(tmp_path / "[abcde]*", n_active_shards=1)
    assert ids(check_resume(dataset)) == list(range(13))
    with dataset.iter() as samples:
        assert samples.report().get("bad_records", 0) == 0
        assert len(list(samples)) == 13
        assert samples.report()["bad_records"] == 1
    (tmp_path / "f.json").write_text('[{"id": 1},')
    with pytest.raises(DataError, match=r"f\.json is not JSON"):
        ids(files(tmp_path / "f.json"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_that_is_not_utf8_is_refused_at_its_first_line(tmp_path, encoding):
    (tmp_path / "a.jsonl").write_text('{"t": "é"}\n{"t": "ü"}\n', encoding=encoding)
    with pytest.raises(DataError, match=r"a\.jsonl line 1: expected UTF-8, got utf-16"):
        list(files(str(tmp_path / "a.jsonl")))


def test_an_epoch_of_empty_files_is_the_last(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.jsonl").write_bytes(b"\n\n")
    assert list(files(f"{tmp_path}/{{0..2}}.jsonl", repeat=True, n_active_shards=2)) == []
    check_resume(files(f"{tmp_path}/{{0..2}}.jsonl", repeat=True))


def test_zstd_with_a_long_window(tmp_path):
    wide = zstandard.ZstdCompressionParameters(window_log=28)  # zstd --long=28
    packed = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(packed.compress(lines(*range(50))) + packed.flush())
    assert ids(files(str(tmp_path / "a.jsonl.zst"))) == [*range(50)]


def test_an_xz_file_that_needs_much_memory_is_refused(tmp_path):
    # The file names the size of its dictionary in this byte.
    small = lzma.compress(lines(1), filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 2**16}])
    at = small.index(b"\x21\x01\x08") + 2
    header = small[12:at] + bytes([36]) + small[at + 1 : 20]  # 1 GiB
    (tmp_path / "a.jsonl.xz").write_bytes(small[:12] + header + zlib.crc32(header).to_bytes(4, "little") + small[24:])
    with pytest.raises(DataError, match=rf"a\.jsonl\.xz: needs more than {2**28} bytes of memory"):
        ids(files(tmp_path / "a.jsonl.xz"))


@pytest.mark.parametrize("name", ["a.cbor", "a.jsonl.gz", "a.cbor.gz", "a.parquet", "a.jsonl.xz", "a.jsonl.zst"])
def test_what_is_truncated_or_something_else_is_named(tmp_path, name):
    whole = cbor2.dumps({"id": 1}) + cbor2.dumps({"id": 2, "x": "y" * 99})
    whole = gzip.compress(whole) if name.endswith(".gz") else whole
    (tmp_path / name).write_bytes(whole[:-20])
    with pytest.raises(DataError, match=name):
        ids(files(str(tmp_path / name)))


@pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip"])
def test_a_parquet_file_damaged_in_the_middle_is_named(tmp_path, compression):
    rows = [{"id": i, "t": f"{i * i:x}" * 40} for i in range(1000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=500, compression=compression)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    middle = len(data) // 2 + 500
    data[middle : middle + 200] = b"x" * 200
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(
        DataError, match=r"a\.parquet: damaged after row \d+ of row group 1: .*; fetch or write it again"
    ):
        ids(files(tmp_path / "a.parquet"))


@pytest.mark.parametrize("column", ["text", "date"])
def test_a_value_of_a_parquet_file_that_can_not_be_read_is_named_and_skips_no_row(tmp_path, column):
    texts = pa.array([b"\xff" if i == 300 else b"x" for i in range(600)], pa.binary())
    table = {
        "text": pa.StringArray.from_buffers(600, *texts.buffers()[1:]),
        "date": pa.array([2**30 if i == 300 else 0 for i in range(600)], pa.date32()),
    }
    pq.write_table(pa.table({"id": range(600), column: table[column]}), tmp_path / "a.parquet")
    with files(tmp_path / "a.parquet").iter() as samples:
        assert [next(samples)["id"] for _ in range(256)] == [*range(256)]
        for _ in range(2):
            with pytest.raises(DataError, match=r"a\.parquet: a row soon after row 256 of row group 0 holds a value"):
                next(samples)


def test_urls_of_files_are_percent_encoded(tmp_path):
    for name in ("sp ace é.jsonl", "100%25.jsonl"):
        (tmp_path / name).write_bytes(lines(len(name)))
        assert ids(files((tmp_path / name).as_uri())) == ids(files(tmp_path / name)) == [len(name)]
    assert ids(files(f"file://{tmp_path}/sp%20*.jsonl")) == [14]


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(DataError, match=r"is a folder: name its files, for instance .*/\*\.jsonl"):
        ids(files(tmp_path))


def test_compressed_files_of_several_members(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(1, 2)) + gzip.compress(b"") + gzip.compress(lines(3)))
    assert ids(check_resume(files(str(tmp_path / "a.jsonl.gz")))) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_a_small_file_that_holds_much_is_decompressed_a_little_at_a_time(tmp_path, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    text = [b"begin" + bytes(2**24), os.urandom(10**6) + b"end\n"]
    path.write_bytes(b"".join(map({"gz": gzip, "bz2": bz2, "xz": lzma, "zst": zstandard}[kind].compress, text)))
    for offset in (0, 2**24 - 1, 2**24 + 10**6):
        given = SourceFile(PipelineContext(), str(path)).pieces(offset)
        found = [*iter(given.read, b"")]
        assert max(map(len, found)) < 9 * 2**19
        assert b"".join(found) == b"".join(text)[offset:]
        assert given.position == path.stat().st_size
        given.close()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_lines_that_are_too_long_are_left_out_and_counted(tmp_path, monkeypatch, caplog, suffix):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 20)
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    # The beginning of one is an object; another one is blank.
    long = [b'{"id": 7}' + b" " * 40 + b"x\n", b'{"id": "' + b"x" * 70_000 + b'"}\n', b" " * 21 + b"\n"]
    path.write_bytes(pack(lines(1) + long[0] + lines(2) + long[1] + long[2] + b'{"id": 3  }        \n' + lines(4)))
    monkeypatch.setattr(pieces, "FIRST_PIECE", 7)
    assert ids(check_resume(files(path))) == [1, 2, 3, 4]
    with files(path).iter() as samples:
        assert [s["id"] for s in samples] == [1, 2, 3, 4]
        assert samples.report()["bad_records"] == 3
    assert f"{path}: the line at byte 10 has more than 20 bytes (cut it) and is skipped" in caplog.text
    path.write_bytes(pack(long[1]))
    with pytest.raises(DataError, match="not one of its 1 records is usable: the last has more than 20 bytes"):
        ids(files(path))


def test_a_cbor_item_that_is_too_long_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.cbor"
    path.write_bytes(cbor2.dumps({"id": 1}) + cbor2.dumps({"id": "x" * 100}) + cbor2.dumps({"id": 2}))
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 50)
    for piece in (1, 64, 2**16):
        monkeypatch.setattr(pieces, "FIRST_PIECE", piece)
        with files(path).iter() as samples:
            assert next(samples) == {"id": 1}
            for _ in range(2):
                with pytest.raises(DataError, match="the item at byte 5 has more than 50 bytes: cut it"):
                    next(samples)


def test_a_json_element_that_is_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(json_list, "MAX_RECORD_BYTES", 50)
    (tmp_path / "a.json.zst").write_bytes(zstandard.compress(json.dumps([{"id": 1}, {"id": "x" * 100}]).encode()))
    with files(tmp_path / "a.json.zst").iter() as samples:
        assert next(samples) == {"id": 1}
        with pytest.raises(DataError, match=r"a\.json\.zst: element 2 has more than 50 characters: cut it"):
            next(samples)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_compressed_files_that_never_begin_are_named(tmp_path, kind):
    path = tmp_path / f"a.jsonl.{kind}"
    packed = {"gz": gzip, "bz2": bz2, "xz": lzma, "zst": zstandard}[kind].compress
    path.write_bytes(packed(lines(1)) + bytes(5000) + packed(lines(2)) + bytes(5000))
    assert ids(files(path)) == [1, 2]
    path.write_bytes(packed(b""))
    assert ids(files(path)) == []
    for content, says in ((b"", "has no bytes"), (bytes(5000), "begins with zeros"), (b"\0" + packed(b""), "zeros")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.jsonl\.{kind}: .*{says}"):
            ids(files(path))


def test_a_resume_reads_on_at_the_byte_and_only_in_the_same_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(*range(20_000)))
    with files(str(path)).iter() as samples:
        for _ in range(12_000):
            next(samples)
        state = samples.state_dict()
    ((*number, place),) = state["position"]["active"]
    assert (number, place["place"]) == ([0, 0, 1], len(lines(*range(12_000))))
    assert place["version"].startswith(f"{path.stat().st_size}:local-")
    assert len(json.dumps({**state, "arrays": {}})) < 1000
    # Earlier bytes are not read, except for the first 64 KiB.
    content = path.read_bytes()
    path.write_bytes(content[: 2**16] + b"?" * (place["place"] - 2**16) + content[place["place"] :])
    assert ids(files(str(path)).iter(state_dict=state)) == list(range(12_000, 20_000))
    path.write_bytes(lines(*range(19_999)))
    with pytest.raises(DataError, match="the state was saved in a file of version"):
        next(files(str(path)).iter(state_dict=state))


def test_a_state_fits_a_folder_that_has_moved_and_no_other_list_of_files(tmp_path):
    for folder in ("here", "there/deep"):
        (tmp_path / folder / "a").mkdir(parents=True)
        for i, name in enumerate(("0", "a/1", "a/2")):
            (tmp_path / folder / f"{name}.jsonl").write_bytes(lines(*range(10 * i, 10 * i + 5)))
    dataset = files(f"{tmp_path}/here/{{0,a/1,a/2}}.jsonl")
    with dataset.iter() as samples:
        for _ in range(7):
            next(samples)
        state = samples.state_dict()
        rest = [sample["id"] for sample in samples]
    assert ids(files(f"{tmp_path}/there/deep/{{0,a/1,a/2}}.jsonl").iter(state_dict=state)) == rest
    assert ids(files(f"file://{tmp_path}/here/**/*.jsonl").iter(state_dict=state)) == rest  # the same pattern
    (tmp_path / "here" / "0.jsonl").rename(tmp_path / "gone.jsonl")
    says = r"file 2 was /.*/deep/a/1\.jsonl when the state was saved, here it is /.*/deep/a/2\.jsonl"
    with pytest.raises(StateError, match=says):
        files(f"{tmp_path}/there/deep/{{0,a/2,a/1}}.jsonl").iter(state_dict=state)
    says = r"had 3 files when the state was saved, here it has 2; the state's file /.*/there/deep/a/2\.jsonl is missing"
    with pytest.raises(StateError, match=says):
        files(f"{tmp_path}/there/deep/{{0,a/1}}.jsonl").iter(state_dict=state)
    (tmp_path / "there/deep/0.jsonl").write_bytes(lines(1))
    with pytest.raises(DataError, match=r"0\.jsonl: the state was saved in a file of version"):
        ids(files(f"{tmp_path}/there/deep/{{0,a/1,a/2}}.jsonl").iter(state_dict=state))


@pytest.mark.parametrize("at", ["here", "moved"])
@pytest.mark.parametrize(
    ("given", "differs"),
    [
        (("a/1", "a/2", "b/3"), r"\S*/b/3\.jsonl is not one of the state's files"),  # the common folder is higher
        (("b/3", "a/1", "a/2"), r"\S*/b/3\.jsonl is not one of the state's files"),
        (("a/1",), r"the state's file \S*/a/2\.jsonl is missing"),
        (("a/2",), r"the state's file \S*/a/1\.jsonl is missing"),
        (("a/1", "a/2", "a/2"), r"file 3, \S*/a/2\.jsonl, is in only one of the lists"),
    ],
)
def test_a_change_of_the_common_folder_names_the_file_that_differs(tmp_path, at, given, differs):
    for name in ("a/1", "a/2", "b/3"):
        (tmp_path / "here" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "here" / f"{name}.jsonl").write_bytes(lines(1, 2))
    with files([f"{tmp_path}/here/a/{number}.jsonl" for number in (1, 2)]).iter() as samples:
        next(samples)
        state = samples.state_dict()
    (tmp_path / "here").rename(tmp_path / at)
    with pytest.raises(StateError, match=rf"had 2 files .* here it has {len(given)}; {differs}"):
        files([f"{tmp_path}/{at}/{name}.jsonl" for name in given]).iter(state_dict=state)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize("at", [0, 4999])
def test_an_edit_that_keeps_the_size_is_refused_and_a_copy_is_not(tmp_path, suffix, at, moved):
    rows, (here, there) = [{"id": 10_000 + i} for i in range(5000)], (tmp_path / "here", tmp_path / "there")

    def write(folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        path = folder / f"a{suffix}"
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, use_dictionary=False, compression="none")
        else:
            data = lines(*(row["id"] for row in rows))
            path.write_bytes(gzip.compress(data, 0, mtime=0) if suffix == ".jsonl.gz" else data)
        return path

    path = write(here)
    with files(path).iter() as samples:
        for _ in range(100):
            next(samples)
        state = samples.state_dict()
    assert len(ids(files(write(there if moved else here)).iter(state_dict=state))) == 4900
    rows[at] = {"id": 77_777}
    size = path.stat().st_size
    changed = write(there if moved else here)
    assert changed.stat().st_size == size
    with pytest.raises(
        DataError, match=r"the state was saved in a file of version \(size and ETag or hash\) \d+:local-"
    ):
        ids(files(changed).iter(state_dict=state))


def test_a_state_can_be_taken_after_closing_and_of_a_version_by_size_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(1, 2, 3))
    with files(path).iter() as samples:
        next(samples)
    state = samples.state_dict()
    assert ids(files(path).iter(state_dict=state)) == [2, 3]
    state["position"]["active"][0][3]["version"] = str(path.stat().st_size)  # as it was before files were hashed
    assert ids(files(path).iter(state_dict=state)) == [2, 3]


def test_formats_by_name_or_as_told(tmp_path):
    (tmp_path / "a.txt").write_bytes(lines(1))
    assert ids(files(str(tmp_path / "a.txt"), format="jsonl")) == [1]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(lines(2)))
    assert ids(files(f"file://{tmp_path}/a.txt.gz", format="jsonl")) == [2]
    with pytest.raises(DataError, match=r"a\.txt: the name does not tell"):
        ids(files(str(tmp_path / "a.txt")))
    with pytest.raises(FileNotFoundError):
        ids(files(str(tmp_path / "none.jsonl")))


@pytest.mark.parametrize(
    "wrong",
    [{"format": "csv"}, {"n_active_shards": 0}, {"n_standby_shards": -1}, {"timeout": 0}, {"n_prefetch_samples": -1},
     {"urls": [], "repeat": True}, {"max_bad_fraction": 1.1}, {"max_bad_fraction": -1}],
)  # fmt: skip
def test_refused_arguments(wrong):
    with pytest.raises(ValueError, match="from_files"):
        files(**{"urls": "x.jsonl", **wrong})


def test_order_follows_from_files_active_shards_and_seed_alone(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.jsonl").write_bytes(lines(*range(10 * i, 10 * i + 3 * i % 5)))

    def order(**options):
        return ids(files(f"{tmp_path}/{{0..5}}.jsonl", **options))

    for standby in (0, 1, 9):
        for ahead in (0, 10):
            assert order(n_standby_shards=standby, n_prefetch_samples=ahead) == order()
    assert order(n_active_shards=1) == sorted(order())
    assert order(n_active_shards=2) != order()
    assert order(shuffle_shards=True, seed=1) != order(shuffle_shards=True, seed=2)


def test_globs_are_sorted_and_a_state_knows_its_files(tmp_path):
    for name in ("b/2", "a/1", "c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_bytes(lines(ord(name[0])))
    dataset = files(f"{tmp_path}/**/*.jsonl", n_active_shards=1)
    with dataset.iter() as samples:
        assert [s["id"] for s in samples] == [97, 98, 99]
        state = samples.state_dict()
    (tmp_path / "d.jsonl").write_bytes(lines(0))
    with pytest.raises(StateError, match=r"had 3 files .* here it has 4; /.*/d\.jsonl is not one of the state's files"):
        files(f"{tmp_path}/**/*.jsonl", n_active_shards=1).iter(state_dict=state)
    with pytest.raises(FileNotFoundError, match="no file matches"):
        ids(files(f"{tmp_path}/*.cbor"))
    (tmp_path / "x[1].jsonl").write_bytes(lines(5))
    assert ids(files(f"{tmp_path}/x[1].jsonl")) == [5]


def test_closing_leaves_no_file_open(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.jsonl").write_bytes(lines(*range(9)))
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with files(f"{tmp_path}/*.jsonl").iter() as samples:
        next(samples)
    dropped = files(f"{tmp_path}/*.jsonl").iter()
    next(dropped)
    del dropped
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_urls_in_words():
    assert urls.expand_braces(["s3://b/{a,c}/{08..10}.x", "y"]) == [
        *(f"s3://b/{folder}/{n}.x" for folder in "ac" for n in ("08", "09", "10")), "y"]  # fmt: skip
    assert [urls.scheme_of(url) for url in ("a/b", "S3://b/k", "file:///x")] == ["file", "s3", "file"]
    assert urls.store_key("s3://b/k/l") == ("b", "k/l")
    assert urls.file_name("https://h/p/A.jsonl?sig=x/y.cbor") == "a.jsonl"
    assert urls.local_path("file:///x/y") == Path("/x/y")
    with pytest.raises(DataError):
        urls.store_key("s3://bucket")
    for pattern, yes, no in [
        ("a/*.x", "a/b.x", "a/b/c.x"),
        ("a/**/*.x", "a/b/c/d.x", "b/a/c.x"),
        ("a/**/*.x", "a/d.x", "a/d.y"),
        ("a/**", "a/b/c", "b"),
        ("a?[0-9].x", "ab3.x", "ab33.x"),
        ("[!a].x", "b.x", "a.x"),
        ("a+.x", "a+.x", "aa.x"),
    ]:
        assert urls.key_matches(pattern, yes)
        assert not urls.key_matches(pattern, no)

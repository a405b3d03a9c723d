"""Whole preparations: the same bytes from every engine and after every interruption, and their content."""

import filecmp
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tplr.cli import main
from tplr.errors import ConfigError, DataError
from tplr.stores.datasets import DatasetFactory
from tplr.stores.detect import JOURNAL, REPORT, detect_format
from tplr.stores.factory import StoreFactory
from tplr.stores.preprocess import pipeline
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.pipeline import folder_name, prepare

TEXT = {"input": {"sections": [{"field": "text"}]}, "preprocessing": {"min_chars": 1}}


def config(**changes) -> PipelineConfig:
    value = json.loads(json.dumps(TEXT))
    for name, change in changes.items():
        value[name] = {**value.get(name, {}), **change}
    return PipelineConfig.from_dict(value)


def texts(count: int) -> list[str]:
    return [f"{i} " + "words and more "[: i * 7 % 15] * (i % 4) for i in range(count)]


def write_lines(path: Path, records: list) -> Path:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def same_trees(one: Path, other: Path) -> bool:
    found = [sorted(path.relative_to(tree) for path in tree.rglob("*")) for tree in (one, other)]
    files = [path for path in found[0] if (one / path).is_file()]
    _, differ, missing = filecmp.cmpfiles(one, other, files, shallow=False)
    return found[0] == found[1] and not differ and not missing


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files and three domains, with blank and broken lines among them."""
    folder = tmp_path_factory.mktemp("raw")
    records: list = [{"text": text, "site": ("a", "b/c", None)[i % 3]} for i, text in enumerate(texts(60))]
    records[7:7] = ["", "{broken", '{"site": "a"}']
    write_lines(folder / "part-2.jsonl", records[:40])
    write_lines(folder / "part-10.jsonl", records[40:])
    return folder


CONFIG = config(
    preprocessing={"packing_strategy": "bfd", "max_packed_len": 40, "max_seq_len": 50},
    output={"max_tokens_per_shard": 150, "domain_key": "site"},
)


@pytest.fixture(scope="module")
def reference(mixed: Path, tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference") / "out"
    prepare([mixed], out, CONFIG, tokenizer_path)
    return out


def test_what_stands_in_the_store(mixed: Path, reference: Path) -> None:
    report = json.loads((reference / "prepare.json").read_text())
    counts = report["progress"]["counts"]
    assert counts["skipped"] == {"malformed record": 1, "missing field": 1}
    assert (counts["read"], counts["used"]) == (62, 60)
    domains = {"a": "a", "b/c": "b%2Fc", None: "__default__"}
    assert sorted(path.name for path in reference.iterdir()) == sorted([*domains.values(), "prepare.json"])
    written = 0
    for number, name in enumerate(domains.values()):
        store = StoreFactory.create("bin")
        store.load(reference / name)
        written += len(store)
        sequence, mask = store.fetch(0, len(store), "sequence"), store.fetch(0, len(store), "loss_mask")
        assert {len(store.stream(key)) for key in store.keys} == {len(store)}  # equal lengths of all keys
        # Documents begin where positions do, with BOS; the text follows, trained on, and cut where it was too long.
        starts = torch.nonzero(store.fetch(0, len(store), "position_ids") == 0).flatten().tolist()
        assert mask.all()
        documents = [sequence[a:b] for a, b in zip(starts, [*starts[1:], len(store)], strict=True)]
        assert all(document[0] == 1 for document in documents)
        expected = [len(text) + 1 for i, text in enumerate(texts(60)) if i % 3 == number]
        assert sorted(map(len, documents)) == sorted(min(length, 40) for length in expected)
        assert all(len(store.fetch_record(i, ["sequence"])["sequence"]) <= 40 for i in range(store.num_records))
    assert written == counts["tokens"]
    assert written + counts["cut_tokens"] == sum(len(text) + 1 for text in texts(60))  # none lost uncounted
    assert len(report["progress"]["shards"]) > 6


def test_four_processes_write_the_same_bytes(
    mixed: Path, reference: Path, tokenizer_path: Path, tmp_path: Path
) -> None:
    prepare([mixed], tmp_path / "out", CONFIG, tokenizer_path, workers=4, batch_size=5)
    assert same_trees(reference, tmp_path / "out")


@pytest.mark.localnet  # beside five other tests Ray's processes do not answer each other in time
@pytest.mark.timeout(240)
def test_ray_writes_the_same_bytes(mixed: Path, reference: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    prepare([mixed], tmp_path / "out", CONFIG, tokenizer_path, engine="ray", workers=1, batch_size=9)
    assert same_trees(reference, tmp_path / "out")


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """``[n]``: the program ends after it writes the n-th shard from now, before it records the shard."""
    left = [0]
    write = pipeline.write_shard

    def once(*args, **kwargs):
        meta = write(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0:
            raise Interrupted
        return meta

    monkeypatch.setattr(pipeline, "write_shard", once)
    return left


@pytest.mark.parametrize("every", [1, 2, 4])
def test_interrupted_runs_end_with_the_same_bytes(
    mixed: Path, reference: Path, tokenizer_path: Path, tmp_path: Path, interrupted: list[int], every: int
) -> None:
    (tmp_path / "out").mkdir()  # a process that was killed while it wrote its first journal leaves this
    (tmp_path / "out" / f"{JOURNAL}.7-ab.tmp").write_text('{"conf')
    # A flush that was not recorded is written again: every other attempt completes one of three shards.
    stops = 0
    for attempt in range(40):
        interrupted[0] = every + 3 * (attempt % 2)
        try:
            prepare([mixed], tmp_path / "out", CONFIG, tokenizer_path, batch_size=3 + attempt)
            break
        except Interrupted:
            stops += 1
    assert stops > 2
    assert same_trees(reference, tmp_path / "out")
    interrupted[0] = 1
    again = prepare([mixed], tmp_path / "out", CONFIG, tokenizer_path)  # finished: nothing is written
    assert again.counts.used == 60


@pytest.mark.parametrize("strategy", ["simple", "bfd", "bfd_split"])
def test_every_format_gives_the_same_batches(tokenizer_path: Path, tmp_path: Path, strategy: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts(30)])
    found = []
    for storage_format in ("bin", "h5", "jsonl"):
        out = tmp_path / storage_format
        settings = {"packing_strategy": strategy, "max_packed_len": 32}
        made = config(preprocessing=settings, output={"storage_format": storage_format, "max_tokens_per_shard": 200})
        prepare([source], out, made, tokenizer_path)
        assert detect_format(out) == storage_format
        dataset = DatasetFactory.load("sft", out, 16, 5)
        found.append([dataset[i] for i in range(len(dataset))])
    assert len(found[0]) > 20
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert all(torch.equal(one[key], same[key]) for key in one)


def test_json_and_parquet_give_what_json_lines_give(tokenizer_path: Path, tmp_path: Path) -> None:
    records = [{"text": text} for text in texts(20)]
    write_lines(tmp_path / "in.jsonl", records)
    (tmp_path / "in.json").write_text(json.dumps(records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "in.parquet", row_group_size=6)
    made = config(output={"max_tokens_per_shard": 100})
    for kind in ("jsonl", "json", "parquet"):
        out = tmp_path / kind
        prepare([tmp_path / f"in.{kind}"], out, made, tokenizer_path, batch_size=4)
        (out / "prepare.json").unlink()
        assert same_trees(tmp_path / "jsonl", out)


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_other_files_are_gone_on_with_too(
    tokenizer_path: Path, tmp_path: Path, interrupted: list[int], kind: str
) -> None:
    records = [{"text": text} for text in texts(20)]
    (tmp_path / "in.json").write_text(json.dumps(records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "in.parquet", row_group_size=6)
    made = config(output={"max_tokens_per_shard": 60})
    whole = prepare([tmp_path / f"in.{kind}"], tmp_path / "whole", made, tokenizer_path)
    interrupted[0] = 3
    with pytest.raises(Interrupted):
        prepare([tmp_path / f"in.{kind}"], tmp_path / "out", made, tokenizer_path)
    prepare([tmp_path / f"in.{kind}"], tmp_path / "out", made, tokenizer_path, batch_size=2)
    assert len(whole.shards) > 3
    assert same_trees(tmp_path / "whole", tmp_path / "out")


def test_rewards_stay_floats_and_pairs_stay_pairs(tokenizer_path: Path, tmp_path: Path) -> None:
    asked = {"field": "prompt", "action": "mask"}
    pairs = {key: {"sections": [asked, {"field": key}]} for key in ("chosen", "rejected")}
    rewards = {"sections": [{"field": "rewards", "action": "value"}]}
    groups = {
        "prompts": {"sections": [asked], "mask_key": None},
        "responses": {"sections": [{"field": "x"}], "list_field": "answers", "mask_key": "masks"},
        "rewards": rewards,
    }
    source = write_lines(tmp_path / "in.jsonl", [
        {"prompt": "p" * i, "chosen": "c" * (i + 1), "rejected": "r"}
        | {"answers": ["a", "b" * i], "rewards": [0.8, i / 7]}
        for i in range(1, 12)
    ])  # fmt: skip
    for train_type, sources in (("dpo", pairs), ("grpo", groups)):
        batches = []
        for storage_format in ("bin", "h5", "jsonl"):
            out = tmp_path / f"{train_type}-{storage_format}"
            output = {"storage_format": storage_format, "max_tokens_per_shard": 40}
            value = {"input": {"sources": sources}, "preprocessing": {"min_chars": 0}, "output": output}
            prepare([source], out, PipelineConfig.from_dict(value), tokenizer_path)
            dataset = DatasetFactory.load(train_type, out, 0)
            assert len(dataset) == 11
            batches.append(dataset.collate([dataset[i] for i in range(11)]))
        for other in batches[1:]:
            assert all(torch.equal(batches[0][key], other[key]) for key in batches[0])
        if train_type == "grpo":
            expected = torch.tensor([[0.8, i / 7] for i in range(1, 12)])
            assert torch.equal(batches[0]["rewards"], expected)
        else:
            assert batches[0]["chosen_mask"].sum(1).tolist() == [i + 1 for i in range(1, 12)]


def test_only_so_many_records(mixed: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    made = config(preprocessing={"max_items": 9})
    few = [prepare([mixed], tmp_path / str(size), made, tokenizer_path, batch_size=size) for size in (2, 256)]
    assert few[0].counts.used == 9
    assert few[0].counts == few[1].counts
    assert same_trees(few[0].folder, few[1].folder)


def test_dtypes_that_do_not_fit_are_refused_not_wrapped(tokenizer_path: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "ÿ~"}])
    with pytest.raises(ConfigError, match=r"sequence holds \d+, which int8 can.t represent"):
        prepare([source], tmp_path / "out", config(output={"dtype": {"sequence": "int8"}}), tokenizer_path)
    prepare([source], tmp_path / "fits", config(output={"dtype": {"sequence": "uint16"}}), tokenizer_path)
    assert np.fromfile(tmp_path / "fits/__default__/shard_0000/sequence.bin", np.uint16)[0] == 1


def test_what_can_not_be_begun_is_said(
    mixed: Path, tokenizer_path: Path, tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(says: str, inputs: list[Path], out: Path = tmp_path / "out", made: PipelineConfig = CONFIG) -> None:
        with pytest.raises((ConfigError, DataError), match=says):
            prepare(inputs, out, made, tokenizer_path)

    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.json").write_text("[{")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    refused("no such file", [tmp_path / "nowhere"])
    refused("expected files of", [tmp_path / "notes.txt"])
    refused("given twice", [mixed, mixed / "part-2.jsonl"])
    refused("is not empty and has no unfinished", [mixed], mixed)
    refused("its config differs", [mixed], reference, config())
    refused(r"none of 0 records is usable: empty file \(1\)", [tmp_path / "empty.jsonl"])
    refused("broken.json is not JSON", [tmp_path / "broken.json"], tmp_path / "a")
    refused("broken.parquet: damaged", [tmp_path / "broken.parquet"], tmp_path / "b")
    monkeypatch.setitem(sys.modules, "h5py", None)
    refused("need the extra", [mixed], tmp_path / "c", config(output={"storage_format": "h5"}))


@pytest.mark.parametrize("name", [REPORT, JOURNAL])
@pytest.mark.parametrize("content", ["", "steps: 3", "[1]", "3", '{"sources": 1}', '{"sources": [], "config": {}}'])
def test_a_folder_with_a_file_of_another_program_is_refused(
    mixed: Path, tokenizer_path: Path, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=r"choose another folder, or remove it"):
        prepare([mixed], tmp_path, CONFIG, tokenizer_path)
    assert (tmp_path / name).read_text() == content


LONE = "\ud83d and more"


@pytest.mark.parametrize(
    ("sections", "bad", "told"),
    [
        ([{"field": "text"}], {"text": "t", "site": LONE}, "in 'site', at 0"),
        ([{"field": "text"}], {"text": f"t {LONE}"}, "in the text, at 2"),
        ([{"field": "chat", "template": True}], {"chat": [{"role": "user", "content": LONE}]}, "in the text, at 6"),
        ([{"field": "chat", "template": True}], {"chat": [{"role": LONE, "content": "c"}]}, "in the text, at 1"),
        ([{"field": "chat", "template": True}], {"chat": [{"role": "forbidden", "content": LONE}]}, "no such role"),
    ],
    ids=["domain", "text", "content", "role", "refused"],
)
def test_half_a_surrogate_pair_costs_its_record_alone(
    tokenizer_path: Path, tmp_path: Path, caplog, sections: list, bad: dict, told: str
) -> None:
    good = {"text": "good", "chat": [{"role": "user", "content": "good"}], "site": "a"}
    source = write_lines(tmp_path / "in.jsonl", [good, bad, good])
    settings = {"input": {"sections": sections}, "preprocessing": {"min_chars": 0}, "output": {"domain_key": "site"}}
    done = prepare([source], tmp_path / "out", PipelineConfig.from_dict(settings), tokenizer_path)
    assert (done.counts.used, sum(done.counts.skipped.values())) == (2, 1)
    assert "in.jsonl line 2 is left out: " in caplog.text
    assert told in caplog.text


def test_domains_as_folder_names() -> None:
    assert [folder_name(name) for name in ("a", "a/b", "..", ".x", "ä b")] == ["a", "a%2Fb", "%2E.", "%2Ex", "%C3%A4 b"]
    assert [folder_name(name) for name in (REPORT, f"{REPORT}2")] == ["%70repare.json", "prepare.json2"]
    assert len({folder_name("x" * 300), folder_name("x" * 300 + "y")}) == 2


def test_raw_lines_are_tokenized_while_they_are_loaded(tokenizer_path: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    source = write_lines(tmp_path / "in.jsonl", [{"messages": chat}, "{half", {"messages": chat}])
    dataset = DatasetFactory.load("sft", source, 12, tokenizer_path=tokenizer_path)
    item = dataset[0]
    assert item["input_ids"].tolist()[0] == 1
    spawned = pickle.loads(pickle.dumps(dataset))  # as in a spawned worker
    assert (spawned[0]["input_ids"] == item["input_ids"]).all()
    spawned.store.load(source)
    assert item["loss_mask"].tolist() == [False] * 8 + [True] * 4
    pair = write_lines(tmp_path / "pair.jsonl", [{"input": "Q", "chosen": chat[1:], "rejected": "no"}])
    item = DatasetFactory.load("dpo", pair, 0, tokenizer_path=tokenizer_path, max_len=11)[0]
    assert (len(item["chosen"]), item["rejected_mask"].sum()) == (11, 2)
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set/x.jsonl", [{"body": "abc"}])
    made = {"input": {"sections": [{"field": "body"}]}, "preprocessing": {"min_chars": 0}}
    (tmp_path / "set/dataset_config.json").write_text(json.dumps(made))
    assert len(DatasetFactory.load("seq", tmp_path / "set", 3, tokenizer_path=tokenizer_path)) == 1


def test_the_command(mixed: Path, tokenizer_path: Path, tmp_path: Path, reference: Path, capsys) -> None:
    CONFIG.to_file(tmp_path / "c.json")
    command = ["data", "prepare", str(mixed), "-o", str(tmp_path / "out"), "-c", str(tmp_path / "c.json")]
    assert main([*command, "--tokenizer", str(tokenizer_path)]) == 0
    assert same_trees(reference, tmp_path / "out")
    out, err = capsys.readouterr()
    assert "60 records" in out
    assert "1 × malformed record, 1 × missing field" in out
    assert "part-2.jsonl line 9 is left out: not JSON" in err
    assert main([*command, "--tokenizer", str(tokenizer_path), "--workers", "0"]) == 2
    assert "--workers 0: expected 1 or more" in capsys.readouterr().err

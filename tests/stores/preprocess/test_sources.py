"""A preparation is recognised by the content of its sources; files of equal name and size may differ."""

import json
import os
from pathlib import Path

import pytest

from tplr.errors import ConfigError, DataError
from tplr.stores.preprocess import sources
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.pipeline import prepare
from tplr.streams.iterator import PipelineContext
from tplr.streams.sources.source_file import SourceFile

CONFIG = PipelineConfig.from_dict({"input": {"sections": [{"field": "t"}]}, "preprocessing": {"min_chars": 0}})


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TPLR_CACHE_FOLDER", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path in found:
        path.write_text(json.dumps({"t": path.stem}) + "\n")
    return found


@pytest.mark.parametrize("keeps_mtime", [False, True])
def test_a_source_edited_at_equal_size_is_noticed(files, tokenizer_path: Path, tmp_path: Path, keeps_mtime) -> None:
    prepare(files, tmp_path / "out", CONFIG, tokenizer_path)
    before = files[1].stat()
    files[1].write_text(files[1].read_text().replace("two", "TWO"))
    assert files[1].stat().st_size == before.st_size
    if keeps_mtime:
        os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ConfigError, match=r"out holds another preparation: the content of source two.jsonl changed"):
        prepare(files, tmp_path / "out", CONFIG, tokenizer_path)


def test_what_differs_is_said(files, tokenizer_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(says: str, inputs: list[Path], config: PipelineConfig = CONFIG) -> None:
        with pytest.raises(ConfigError, match=says):
            prepare(inputs, out, config, tokenizer_path)

    prepare(files, out, CONFIG, tokenizer_path)
    refused("its config differs", files, PipelineConfig.from_dict({**CONFIG.to_dict(), "mask_default": "train"}))
    refused("the sources were one.jsonl, two.jsonl; now they are two.jsonl, one.jsonl", files[::-1])
    files[0].write_text('{"t": "longer"}\n')
    refused("source one.jsonl changed: 13 bytes then, 16 now", files)
    report = json.loads((out / "prepare.json").read_text())
    del report["sources"]
    (out / "prepare.json").write_text(json.dumps(report))
    refused("an earlier version created it", files)


def test_moved_and_touched_sources_are_the_same(files, tokenizer_path: Path, tmp_path: Path) -> None:
    prepare(files, tmp_path / "out", CONFIG, tokenizer_path)
    (tmp_path / "moved").mkdir()
    moved = [path.rename(tmp_path / "moved" / path.name) for path in files]
    moved[0].touch()
    assert prepare(moved, tmp_path / "out", CONFIG, tokenizer_path).counts.used == 2


def test_a_source_is_hashed_once(files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    digest = sources.hashlib.file_digest

    def counted(file, name):
        hashed.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(sources.hashlib, "file_digest", counted)

    def identity() -> list[dict]:
        return sources.Sources(
            [SourceFile(PipelineContext(), str(path)) for path in files], tmp_path / "cache"
        ).identity

    first = identity()
    assert identity() == first
    assert hashed == ["one.jsonl", "two.jsonl"]
    files[0].write_text("changed\n")
    assert identity()[1:] == first[1:]
    assert hashed == ["one.jsonl", "two.jsonl", "one.jsonl"]


def test_a_source_that_changes_while_it_is_read(files, tokenizer_path: Path, tmp_path: Path) -> None:
    def edit(*_: object) -> None:
        files[0].write_text('{"t": "ONE"}\n')

    with pytest.raises(DataError, match=r"one.jsonl changed while it was read"):
        prepare(files, tmp_path / "out", CONFIG, tokenizer_path, on_progress=edit)
    assert not (tmp_path / "out/prepare.json").exists()

"""Real processes on one output folder: two at once, and one after another that was killed."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked_python
import pytest

from tplr.config import process_variables
from tplr.errors import DataError
from tplr.localnet.network import base_environment
from tplr.stores.datasets import DatasetFactory
from tplr.stores.preprocess.config import PipelineConfig
from tplr.stores.preprocess.journal import LOCK
from tplr.stores.preprocess.pipeline import prepare

pytestmark = pytest.mark.timeout(120)

CONFIG = PipelineConfig.from_dict({
    "input": {"sections": [{"field": "text"}]},
    "preprocessing": {"min_chars": 1},
    "output": {"max_tokens_per_shard": 5000},
})  # fmt: skip


class Writers:
    """Starts ``tplr data prepare`` on one source and ends its remaining processes."""

    def __init__(self, folder: Path, tokenizer_path: Path) -> None:
        self._folder = folder
        self.source, self.out, self.tokenizer_path = folder / "in.jsonl", folder / "out", tokenizer_path
        self.source.write_text("".join(json.dumps({"text": f"record {i} " * 8}) + "\n" for i in range(4000)))
        CONFIG.to_file(folder / "c.json")
        paths = [self.source, "-o", self.out, "-c", folder / "c.json", "--tokenizer", tokenizer_path]
        self._command = ["-m", "tplr.cli", "data", "prepare", *map(str, paths), "--batch-size", "16"]
        self._env = base_environment(process_variables(), folder / "home")
        self.started: list[Any] = []

    def start(self) -> Any:
        with (self._folder / f"{len(self.started)}.log").open("wb") as log:
            started = forked_python.start(self._command, env=self._env, folder=self._folder, stdout=log.fileno())
        self.started.append(started)
        return started

    def said(self, process: Any) -> str:
        """Return the output of a process."""
        return (self._folder / f"{self.started.index(process)}.log").read_text()

    def stopped_when(self, reached: Callable[[], bool]) -> Any:
        """A process that is paused when ``reached`` is true, so that others find it running."""
        process = self.start()
        while not reached():
            assert process.poll() is None, self.said(process)
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    def prepare(self, out: Path | None = None):
        return prepare([self.source], out or self.out, CONFIG, self.tokenizer_path)


@pytest.fixture
def writers(tmp_path: Path, tokenizer_path: Path) -> Iterator[Writers]:
    found = Writers(tmp_path, tokenizer_path)
    yield found
    for process in found.started:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_writer_is_refused_and_harms_nothing(writers: Writers, tmp_path: Path) -> None:
    first = writers.stopped_when(lambda: any(writers.out.glob("*/shard_0002")))
    second = writers.start()
    assert second.wait() != 0
    said = writers.said(second)
    assert str(writers.out) in said.replace("\n", "")
    assert f"process {first.pid} on " in said
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == 0
    writers.prepare(tmp_path / "alone")
    assert files(writers.out) == files(tmp_path / "alone")  # no lock, no draft


def test_a_killed_writer_leaves_no_lock_and_no_draft(writers: Writers, tmp_path: Path) -> None:
    os.kill(writers.stopped_when(lambda: any(writers.out.glob("*/.shard_*.tmp/*"))).pid, signal.SIGKILL)
    writers.started[0].wait()
    killed = files(writers.out)
    assert LOCK in killed
    with pytest.raises(DataError, match=r"out is not finished: repeat"):
        DatasetFactory.load("sft", writers.out, 16)
    writers.prepare()
    assert len(DatasetFactory.load("sft", writers.out, 16)) > 10_000
    writers.prepare(tmp_path / "alone")
    assert files(writers.out) == files(tmp_path / "alone")


def test_killed_between_report_and_journal(writers: Writers) -> None:
    writers.prepare()
    (writers.out / ".prepare-journal.json").write_text("{}")
    writers.prepare()
    assert not (writers.out / ".prepare-journal.json").exists()


def test_it_is_finished_only_with_every_shard(writers: Writers) -> None:
    writers.prepare()
    data = writers.out / "__default__/shard_0001/sequence.bin"
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"__default__/shard_0001/sequence.bin has \d+ bytes"):
        writers.prepare()
    data.unlink()
    with pytest.raises(DataError, match=r"out is incomplete: __default__/shard_0001/sequence.bin is missing"):
        writers.prepare()


def test_a_shard_that_vanishes_meanwhile_is_noticed(writers: Writers) -> None:
    first = writers.stopped_when(lambda: any(writers.out.glob("*/shard_0003")))
    next(writers.out.glob("*/shard_0000/meta.json")).unlink()
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() != 0
    assert not (writers.out / "prepare.json").exists()

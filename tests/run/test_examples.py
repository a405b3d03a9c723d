"""The programs in ``examples/`` and the notebook run unchanged."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from forked_python import interpreter
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CACHE = ROOT / ".cache/tplr/localnet"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example in this process, in an empty folder, without environment settings; returns its output."""
    monkeypatch.chdir(tmp_path)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("R2_", "TPLR_"))}
    monkeypatch.setattr(os, "environ", kept)

    def run(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_stream_and_tokenize(example):
    out = example("stream_and_tokenize", "--batches", 5, "--cache", CACHE)
    assert "5 batches of 8 x 128 tokens" in out
    assert "resumed at the same batch" in out


def test_train_from_pages(example):
    assert "30 batches of 8 x 64 tokens: loss" in example("train_from_pages", "--batches", 30, "--cache", CACHE)


def test_sft_store(example):
    out = example("sft_store", "--steps", 15, "--cache", CACHE)
    assert out.startswith("400 conversations prepared; loss on the answers")


def test_history_pandas(recorded, example):
    out = example("history_pandas", recorded.folder)
    assert "held_out_loss" in out
    assert recorded.hotkey(1) in out


@pytest.mark.timeout(320)
def test_exchange_updates(tmp_path):
    """A process without threads of the tests starts its processes."""
    command = [*interpreter(), EXAMPLES / "exchange_updates.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("applied 3 updates") == 3
    assert "all 3 hold the model" in done.stdout


def test_every_example_is_run():
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert {f"test_{name}" for name in programs} <= globals().keys()


@pytest.mark.long
@pytest.mark.timeout(320)
def test_the_notebook_tells_the_story(recorded, monkeypatch, tmp_path):
    monkeypatch.setenv("RUN", str(recorded.folder))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(EXAMPLES / "localnet_story.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # outputs are not committed
    done = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    printed = "".join(one.get("text", "") for cell in done.cells for one in cell.get("outputs", ()))
    assert "Without uid 1, loss after window 7:" in printed
    assert "agreed: True" in printed
    assert "def " in printed

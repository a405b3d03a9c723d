"""``tplr data peek`` and ``tplr data bench`` on a small corpus."""

import json
import threading

import pytest
from guides import from_guide

from tplr.cli import main


@pytest.fixture
def corpus(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("tplr.cli.reported.setup_logging", lambda **_: None)  # logging settings would outlive the test
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for i in range(3):
        lines = [json.dumps({"text": "é" * n, "id": n}) for n in range(1, 40)] + ["broken"]
        (tmp_path / f"{i}.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_peek(corpus, capsys):
    values = {"s3://corpus/*.jsonl": f"{corpus}/*.jsonl", "tokenizer": corpus / "tokenizer"}
    peek = from_guide("docs/data.md", "tplr data peek 's3://corpus/*.jsonl' --tokenizer tokenizer", values)
    assert main([*peek.arguments, "--samples", "1"]) == 0
    said = capsys.readouterr().out
    assert "record 0\n" in said
    assert "record 1\n" not in said
    assert "117 records of 3 files, 3 bad ones left out" in said
    assert "id: int in 117" in said
    assert "2340 characters; a record has 1 to 39, the median 20" in said
    assert "4680 tokens; a record has 2 to 78, the median 40" in said
    assert "0.50 characters a token" in said


def test_a_file_that_does_not_exist_is_named_without_a_traceback(corpus, capsys):
    missing = corpus / "missing.jsonl"
    assert main(["data", "peek", str(missing)]) == 2
    assert capsys.readouterr().err == f"tplr data peek: {missing}: No such file or directory\n"


def test_names_in_a_record_command_no_terminal(corpus, capsys):
    path = corpus / "names.jsonl"
    path.write_text(json.dumps({"text": "\x1b[2J", "\x1b]0;title\x07": 1, "\ud800": 2}) + "\n")
    assert main(["data", "peek", str(path)]) == 0
    said = capsys.readouterr().out
    assert all(line.isprintable() for line in said.splitlines()), said
    assert r"  \x1b]0;title\x07: 1" in said


@pytest.mark.parametrize("verb", ["peek", "bench"])
def test_an_unknown_tokenizer_is_named(verb, corpus, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["data", verb, str(corpus / "0.jsonl"), "--tokenizer", "no-such-folder"]) == 2
    told = capsys.readouterr().err
    assert "--tokenizer 'no-such-folder': neither a local folder nor available from the hub" in told
    assert len(told.splitlines()) == 1


def test_a_hub_that_does_not_answer_is_given_up(corpus, monkeypatch, capsys):
    release = threading.Event()
    monkeypatch.setattr("tplr.tokenizer_files.pretrained_tokenizer", lambda *_: release.wait())
    monkeypatch.setattr("tplr.node.checks.ANSWER_SECONDS", 0.1)
    assert main(["data", "peek", str(corpus / "0.jsonl"), "--tokenizer", "somebody/elsewhere"]) == 2
    release.set()
    assert "--tokenizer 'somebody/elsewhere': not a local folder, and no answer" in capsys.readouterr().err


def test_bench(corpus, capsys):
    values = {"s3://corpus/*.jsonl": f"{corpus}/*.jsonl", "tokenizer": corpus / "tokenizer"}
    bench = from_guide("docs/data.md", "tplr data bench 's3://corpus/*.jsonl' --tokenizer tokenizer", values)
    assert main([*bench.arguments, "--batch", "2", "--length", "16"]) == 0
    said = capsys.readouterr().out
    for what in ("first batch", "tokens per second", "resume", "state"):
        assert what in said
    assert main([*bench.arguments, "--batch", "2", "--length", "16000"]) == 0
    assert "fewer tokens than one sequence" in capsys.readouterr().out

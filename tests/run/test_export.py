"""``tplr export`` on a finished run: its output loads, is the network's model, and can be recomputed."""

import contextlib
import json
import re
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from guides import from_guide

from tplr.exchange.envelope import sign_body
from tplr.localnet import reopen
from tplr.node import windows
from tplr.run import evaluate, export, window_model
from tplr.run.folder import HPARAMS, load_model
from tplr.run.record import RECORD, read_record
from tplr.run.results import write_result
from tplr.schemas import DebugReport, ScoreReport
from tplr.testing.s3server import Delay, Server, Status, serve
from tplr.testing.s3server.faults import Action
from tplr.training.fingerprint import digest


def weights_digest(folder: Path) -> str:
    return digest(dict(load_model(folder, dtype=torch.float32).model.named_parameters()))


def faulty(monkeypatch: pytest.MonkeyPatch, pattern: str, fault: Action, *, times: int | None = None) -> None:
    """Add a fault to the run's storage: for the next ``times`` matching requests, or for all."""
    serve_with(monkeypatch, prepare=lambda server: server.faults.add(pattern, fault, times=times))


def serve_with(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Server], object] = lambda _: None, **more: Any
) -> None:
    """Serve the run's storage with more options of ``serve``, prepared by ``prepare``."""

    @contextlib.asynccontextmanager
    async def serve_prepared(*arguments: Any, **options: Any) -> AsyncIterator[Server]:
        async with serve(*arguments, **options, **more) as server:
            prepare(server)
            yield server

    monkeypatch.setattr(reopen, "serve", serve_prepared)


def test_the_newest_window_is_replayed_and_exported(newest, tplr, tmp_path, capsys):
    recorded = newest
    assert tplr(*from_guide("docs/export.md", "tplr export --local --out model").arguments) == 0
    folder = tmp_path / "model"
    record = read_record(folder)
    assert capsys.readouterr().out == f"model: window {recorded.last}, fingerprint {record.fingerprint}\n"
    assert weights_digest(folder) == record.digest == recorded.digests[recorded.last]
    assert (record.window, record.start_window, record.global_step) == (recorded.last, recorded.start, 5)
    assert record.agreed
    assert [one.window for one in record.windows] == list(range(recorded.start, recorded.last + 1))
    assert [one.held_out_loss for one in record.windows] == [6.0 - 0.1 * one.window for one in record.windows]
    assert all(one.batches == {"1": 1, "2": 1} for one in record.windows)
    batch = recorded.hparams.batch_size * recorded.hparams.sequence_length
    contributors = [(one.uid, one.hotkey, one.windows, one.tokens, one.credit) for one in record.contributors]
    assert contributors == [(1, recorded.hotkey(1), 5, 5 * batch, 0.25), (2, recorded.hotkey(2), 5, 5 * batch, 0.5)]
    assert (folder / HPARAMS).read_bytes() == (recorded.folder / HPARAMS).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "runs"]
    # And again, from the first weights.
    assert tplr("export", "--local", recorded.folder, "--out", "again", "--from", "start") == 0
    assert read_record(tmp_path / "again") == record


def test_a_checkpoints_window_is_streamed(recorded, tplr, tmp_path, monkeypatch):
    """No model is built, and the weights are those of the network."""
    monkeypatch.delattr(window_model, "reading_state")
    assert tplr("export", "--local", recorded.folder, "--out", "model", "--window", recorded.kept) == 0
    assert weights_digest(tmp_path / "model") == recorded.digests[recorded.kept]


def test_a_nodes_saved_state_is_a_source(recorded, tplr, tmp_path):
    state = recorded.folder / "state" / "validator"
    assert tplr("export", "--local", recorded.folder, "--out", "model", "--from", state) == 0
    assert weights_digest(tmp_path / "model") == recorded.digests[recorded.last]


def test_bfloat16_rounds_the_same_weights(recorded, tplr, tmp_path):
    assert tplr("export", "--local", recorded.folder, "--out", "wide") == 0
    assert tplr("export", "--local", recorded.folder, "--out", "model", "--dtype", "bfloat16") == 0
    wide, short = (load_model(tmp_path / name).model.state_dict() for name in ("wide", "model"))
    assert all(torch.equal(short[name], one.bfloat16()) for name, one in wide.items())
    record = read_record(tmp_path / "model")
    assert (record.dtype, record.digest) == ("bfloat16", recorded.digests[recorded.last])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--window", "99"], "window 99: expected one from 3, the run's first, to 7, its newest"),
        (["--window", "2"], "window 2: expected one from 3"),
        (["--from", "nowhere"], "--from nowhere: no saved state of this run of window 8 or before"),
        (["--window", "4", "--from", "checkpoint"], "no checkpoint of version 1 of window 5 or before"),
    ],
)
def test_what_can_not_be_had_is_one_error(recorded, tplr, tmp_path, caplog, words, problem):
    assert tplr("export", "--local", recorded.folder, "--out", "model", *words) == 2
    assert [problem in one.message for one in caplog.records if one.levelname == "ERROR"] == [True]
    assert list(tmp_path.iterdir()) == []


def test_deleted_updates_are_one_error(own_run, tplr, tmp_path, caplog):
    own_run.forget("gradient-4")
    own_run.forget("aggregator-4-v1.safetensors")
    assert tplr("export", "--local", own_run.folder, "--out", "model", "--from", "start") == 2
    assert "window 4: uids [1, 2] are in its included set, and their updates are unavailable" in caplog.text
    assert not (tmp_path / "model").exists()
    # The checkpoint is newer, and the card states that two updates are not counted.
    assert tplr("export", "--local", own_run.folder, "--out", "model") == 0
    assert "(updates of 1 windows are deleted, and not counted)" in (tmp_path / "model" / "README.md").read_text()
    assert read_record(tmp_path / "model").windows[1].batches == {"1": None, "2": None}


def test_windows_of_which_nothing_is_published_cost_no_request(own_run, tplr, tmp_path, monkeypatch):
    """A run has thousands of windows whose objects are deleted."""
    deleted = (own_run.start, own_run.start + 1)
    for window in deleted:
        for kind in ("debug", "scores", "aggregator", "gradient"):
            own_run.forget(f"{kind}-{window}-")
    serve_with(monkeypatch, requests=tmp_path / "requests.jsonl")
    assert tplr("export", "--local", own_run.folder, "--out", "model") == 0
    found = [one.window for one in read_record(tmp_path / "model").windows]
    assert found == [*range(own_run.start + 2, own_run.last + 1)]
    paths = [json.loads(line)["path"] for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert any(f"/debug-{own_run.last}-" in path for path in paths)
    assert [path for path in paths if any(f"-{window}-" in path for window in deleted)] == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--from", "start"],
            r"window 4: uids \[1\] are in its included set, .*: the buckets of uids \[1\] do not answer",
        ),
        ([], "window 4: the update of uid 1 is in no bucket that answers"),
    ],
)
def test_a_miner_whose_bucket_hangs_is_named(own_run, tplr, tmp_path, caplog, monkeypatch, words, problem):
    """Its update is needed for the weights, or, if a checkpoint is newer, for the card."""
    own_run.forget("aggregator-4-v1.safetensors")
    faulty(monkeypatch, "/gradient-4-1-", Delay(3600))
    assert tplr("export", "--local", own_run.folder, "--out", "model", *words) == 2
    assert [bool(re.match(problem, one.message)) for one in caplog.records if one.levelname == "ERROR"] == [True]
    assert not (tmp_path / "model").exists()


def test_an_update_that_no_client_can_read_is_in_no_export_s_way(own_run, tplr, tmp_path):
    """Its miner has replaced it with one that has more headers than HTTP clients accept."""
    own_run.forget("aggregator-4-v1.safetensors")
    own_run.change("gradient-4-1-", lambda body: body, metadata={f"m{number}": "1" for number in range(120)})
    assert tplr("export", "--local", own_run.folder, "--out", "model") == 0
    assert read_record(tmp_path / "model").windows[1].batches == {"1": None, "2": 1}


def test_a_bucket_that_answers_late_is_asked_again(own_run, tplr, tmp_path, monkeypatch):
    own_run.forget("aggregator-4-v1.safetensors")
    faulty(monkeypatch, "/gradient-4-1-", Delay(3600), times=1)
    assert tplr("export", "--local", own_run.folder, "--out", "model") == 0
    assert read_record(tmp_path / "model").windows[1].batches == {"1": 1, "2": 1}


def test_half_a_checkpoint_is_one_error(own_run, tplr, tmp_path, caplog):
    own_run.forget("shard-00000-00000")
    assert tplr("export", "--local", own_run.folder, "--out", "model") == 2
    assert "shard-00000-00000.safetensors" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_model_that_differs_from_the_networks_is_not_exported(own_run, tplr, tmp_path, caplog):
    """One report names another model of the last window: whichever is wrong, this model is not agreed."""

    def lie(raw: bytes) -> bytes:
        _, body = raw.split(b"\n", 1)
        body = re.sub(rb'"fingerprint":"[0-9a-f]{64}"', b'"fingerprint":"' + b"0" * 64 + b'"', body)
        return sign_body(body, kind=DebugReport.kind, window=own_run.last, signer=own_run.signer("validator"))

    own_run.change(f"debug-{own_run.last}-0-", lie)
    assert tplr("export", "--local", own_run.folder, "--out", "model") == 2
    assert f"window {own_run.last}: this model's fingerprint is" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_store_that_throttles_does_not_leave_the_model_unchecked(recorded, tplr, tmp_path, monkeypatch):
    """The report of the last window is read three times, and every request is refused at first."""
    faulty(monkeypatch, f"^GET .*/debug-{recorded.last}-", Status(503, "SlowDown"), times=3)
    assert tplr("export", "--local", recorded.folder, "--out", "model") == 0
    record = read_record(tmp_path / "model")
    assert record.agreed
    assert record.windows[-1].fingerprint == record.fingerprint


def test_a_model_that_can_not_be_checked_now_is_not_exported(recorded, tplr, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(windows, "REPORT_SECONDS", 1.0)
    faulty(monkeypatch, f"^GET .*/debug-{recorded.last}-", Status(503, "SlowDown"))
    assert tplr("export", "--local", recorded.folder, "--out", "model") == 2
    assert f"debug-{recorded.last}-0-v1.json: throttled" in caplog.text
    assert not (tmp_path / "model").exists()


def test_scores_that_say_anything_are_in_no_export_s_way(own_run, tplr, tmp_path):
    """An invalid hotkey of any length, and an object that is not a report."""

    def lie(raw: bytes) -> bytes:
        _, body = raw.split(b"\n", 1)
        body = body.replace(own_run.hotkey(1).encode(), b"x" * 200)
        return sign_body(body, kind=ScoreReport.kind, window=own_run.last, signer=own_run.signer("validator"))

    own_run.change(f"scores-{own_run.last}-0-", lie)
    own_run.change(f"scores-{own_run.last - 1}-0-", lambda _: b" " * 2**21)
    assert tplr("export", "--local", own_run.folder, "--out", "model") == 0
    record = read_record(tmp_path / "model")
    assert [one.held_out_loss is None for one in record.windows] == [False] * 3 + [True, False]
    found = [(one.hotkey, one.windows, one.credit) for one in record.contributors]
    assert found == [(own_run.hotkey(1), 5, None), (own_run.hotkey(2), 5, 0.5)]  # the chain says who has a uid


def change_hands(run, uid: int, window: int) -> None:
    """Write into the chain's past that ``uid`` was another's to the end of the window before ``window``."""
    block, owner = window * run.hparams.blocks_per_window + 1, run.hotkey(uid)
    with contextlib.closing(sqlite3.connect(run.folder / "chain.sqlite")) as chain, chain:
        chain.execute("UPDATE neuron SET hotkey = 'former' WHERE uid = ?", [uid])
        chain.execute("INSERT INTO neuron (block, uid, hotkey, coldkey) VALUES (?, ?, ?, 'cold')", [block, uid, owner])


def test_a_uid_that_changes_hands_is_two_contributors(own_run, tplr, tmp_path):
    """The new owner has no part in the former one's work, and the former one no credit of the new one."""
    owner = own_run.hotkey(2)
    change_hands(own_run, 2, window=own_run.start + 2)
    assert tplr("export", "--local", own_run.folder, "--out", "model") == 0
    batch = own_run.hparams.batch_size * own_run.hparams.sequence_length
    found = [(one.hotkey, one.windows, one.tokens, one.credit) for one in read_record(tmp_path / "model").contributors]
    assert found[1:] == [("former", 2, 2 * batch, None), (owner, 3, 3 * batch, 0.5)]
    assert tplr("export", "--local", own_run.folder, "--verify", "model") == 0


def test_a_window_without_a_report_says_so(own_run, tplr, tmp_path):
    own_run.forget(f"debug-{own_run.last - 1}-0-")
    assert tplr("export", "--local", own_run.folder, "--out", "model", "--window", own_run.last - 1) == 0
    assert not read_record(tmp_path / "model").agreed
    assert "no report was there to compare it with" in (tmp_path / "model" / "README.md").read_text()


def test_a_folder_that_exists_is_not_touched(recorded, tplr, tmp_path, caplog):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("mine")
    assert tplr("export", "--local", recorded.folder, "--out", "model") == 2
    assert "--out model: exists already; give a new folder" in caplog.text
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine"]


def test_outputs_that_can_not_be_written_are_refused_at_the_start(
    recorded, tplr, tmp_path, caplog, capsys, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.delattr(export, "chosen_window")
    monkeypatch.delattr(evaluate, "loaded_state")
    assert tplr("export", "--local", recorded.folder, "--out", "file/model") == 2
    assert f"--out file/model: {tmp_path / 'file'} is a file" in caplog.text
    assert tplr("eval", "--local", recorded.folder, "--results", "file", "--window", "4") == 2
    assert re.search(rf"--results file/evaluation-4\S*: {tmp_path / 'file'} is a file", caplog.text)
    assert tplr("page", "--local", recorded.folder, "--out", "page.html", "--json", "file/page.json") == 2
    assert f"--json file/page.json: {tmp_path / 'file'} is a file" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_folder_without_a_run_is_a_wrong_command_line(tplr, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        tplr("export", "--local", tmp_path, "--out", "model")
    assert refused.value.code == 2
    assert "no hparams.json, so it has no localnet" in capsys.readouterr().err


def test_evaluations_of_the_same_weights_are_in_the_card(recorded, tplr, tmp_path):
    assert tplr("eval", "--local", recorded.folder, "--results", "results", "--window", recorded.last) == 0
    (made,) = (tmp_path / "results").iterdir()
    others = json.loads(made.read_text()) | {"digest": "0" * 64, "seal": ""}
    from tplr.schemas import EvaluationResult

    write_result(tmp_path / "results" / "evaluation-7-v1-other.json", EvaluationResult.model_validate(others))
    words = ("export", "--local", recorded.folder, "--out", "model", "--results", "results")
    assert tplr(*words) == 0
    (found,) = read_record(tmp_path / "model").evaluations
    assert found.digest == recorded.digests[recorded.last]
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"{found.held_out.bits_per_byte:.4f} bits per byte" in card
    assert RECORD in {path.name for path in (tmp_path / "model").iterdir()}

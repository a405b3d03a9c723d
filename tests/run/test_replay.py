"""``tplr replay`` on the run's own updates: without a participant, or by another rule."""

from pathlib import Path

import numpy as np
import pytest
import torch
from guides import from_guide

from tplr.errors import ConfigError
from tplr.hparams import HParams, load_hparams
from tplr.localnet.plan import scheme_constants
from tplr.node.train_state import TrainState
from tplr.run import replay
from tplr.run.replay import CAVEAT, Comparison, comparison, copied_state, with_scheme
from tplr.training.model import build_model
from tplr.training.schedule import outer_learning_rate

ROOT = Path(__file__).parents[2]
HPARAMS = HParams.model_validate(scheme_constants("demo"))


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if line.split() and line.split()[0].isdecimal()]


@pytest.fixture
def measured(monkeypatch) -> list[tuple[str, str, Comparison]]:
    """Digests of the usual and of the changed model when they were measured, and the comparison: what is printed is
    rounded, and random updates may change a loss by less than that.
    """
    seen = []
    measure = replay._measure

    async def spied(network, data_loader, states, window, included):
        found = await measure(network, data_loader, states, window, included)
        seen.append((states[0].digest(), states[1].digest(), found))
        return found

    monkeypatch.setattr(replay, "_measure", spied)
    return seen


def test_without_a_uid_the_model_is_another(newest, tplr, capsys, measured):
    """From the run's first window: which number it has depends on the chain's block at the run's start."""
    replayed = from_guide("docs/export.md", "tplr replay --local --from start --without-uid 1", {"1": 2}).arguments
    assert tplr(*replayed, "--to", "5") == 0
    out = capsys.readouterr().out
    assert [row[0] for row in rows(out)] == ["3", "4", "5"]
    for (usual_model, changed_model, found), row in zip(measured, rows(out), strict=True):
        assert usual_model != changed_model
        assert found.changed != found.as_it_was
        assert found.error > 0
        figures = (found.as_it_was, found.changed, found.difference, found.error)
        assert [float(one) for one in row[1:5]] == pytest.approx(figures, abs=5.1e-6)
        assert int(row[5]) == found.sequences > 8
    assert CAVEAT in out


@pytest.mark.parametrize("outer_delay", [0, 1])
def test_the_usual_side_is_the_run_and_no_step_is_taken_without_updates(outer_delay, request, tplr, monkeypatch):
    """Replayed from the first weights or from a checkpoint, the model is the network's."""
    run = request.getfixturevalue("overlapping" if outer_delay else "recorded")
    assert run.hparams.outer_delay == outer_delay
    seen = []
    compare = replay._compare

    async def spied(network, data_loader, states, windows, without):
        found = await compare(network, data_loader, states, windows, without)
        seen.append((states[0].digest(), states[1].digest(), states[1].global_step))
        return found

    monkeypatch.setattr(replay, "_compare", spied)
    everybody = ("--without-uid", "1", "--without-uid", "2")
    assert tplr("replay", "--local", run.folder, "--from", "4", *everybody) == 0
    assert tplr("replay", "--local", run.folder, "--from", "7", *everybody) == 0
    assert [one[0] for one in seen] == [run.digests[run.last]] * 2
    assert [one[1:] for one in seen] == [(run.digests[3], 1), (run.digests[6], 4)]


@pytest.mark.long
def test_a_void_window_is_replayed_as_nothing(with_void_window, tplr, capsys):
    run = with_void_window
    assert run.digests[4] == run.digests[3]
    assert tplr("replay", "--local", run.folder, "--from", "3", "--to", "5", "--without-uid", "2") == 0
    assert [row[0] for row in rows(capsys.readouterr().out)] == ["3", "4", "5"]


def test_with_another_constant(recorded, tplr, measured):
    words = ("replay", "--local", recorded.folder, "--from", "3", "--to", "3")
    assert tplr(*words, "--with-scheme", "learning_rate.peak=0.0001") == 0
    assert tplr(*words, "--with-scheme", f"learning_rate.peak={recorded.hparams.demo.learning_rate.peak}") == 0
    (usual, changed, other), (same, unchanged, equal) = measured
    assert usual != changed
    assert other.difference != 0
    assert same == unchanged == usual
    assert equal.difference == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--from", "4", "--without-uid", "9"],
            "windows 4 to 7 have no update of it, but of uids [1, 2]",
        ),
        (["--from", "99", "--without-uid", "1"], "window 99: expected one from 3"),
        (
            ["--from", "6", "--to", "4", "--without-uid", "1"],
            "--from 6 --to 4: expected the first window",
        ),
        (
            ["--from", "4", "--with-scheme", "speed=3"],
            "expected a constant of demo: learning_rate.peak",
        ),
        (
            ["--from", "4", "--with-scheme", "momentum_decay=3"],
            "--with-scheme: demo.momentum_decay is 3: Input",
        ),
    ],
)
def test_what_can_not_be_replayed_is_one_error(recorded, tplr, caplog, monkeypatch, words, problem):
    monkeypatch.delattr(replay, "loaded_state")  # it is said before anything is applied
    assert tplr("replay", "--local", recorded.folder, *words) == 2
    assert problem in caplog.text


@pytest.mark.parametrize(
    "words",
    [
        ["--from", "4"],
        ["--from", "4", "--with-scheme", "x"],
        ["--from", "first", "--without-uid", "1"],
        ["--without-uid", "1"],
    ],
)
def test_a_wrong_command_line_ends_with_the_usage(recorded, tplr, words):
    with pytest.raises(SystemExit) as refused:
        tplr("replay", "--local", recorded.folder, *words)
    assert refused.value.code == 2


def test_deleted_updates_are_one_error(own_run, tplr, caplog):
    own_run.forget("gradient-4")
    own_run.forget("aggregator-4-v1.safetensors")
    assert tplr("replay", "--local", own_run.folder, "--from", "4", "--without-uid", "1") == 2
    assert "window 4: uids [1, 2] are in its included set, and their updates are unavailable" in caplog.text


def test_a_copied_state_has_the_shared_tensors_of_its_scheme(tmp_path):
    raw = HPARAMS.model_dump(mode="json") | {"outer": "sparseloco", "demo": None}
    import json

    raw["sparseloco"] = scheme_constants("sparseloco")["sparseloco"]
    hparams = HPARAMS.model_validate_json(json.dumps(raw))
    state = TrainState(build_model(hparams), hparams, tmp_path / "one")
    for tensor in state.outer._momentum.values():
        tensor.fill_(0.5)
    copy = copied_state(state, with_scheme(hparams, {"outer_learning_rate": 0.25}), tmp_path / "two", "cpu")
    assert copy.digest() == state.digest()
    assert copy.outer._momentum.keys() == state.outer._momentum.keys()
    assert all(torch.equal(one, state.outer._momentum[name]) for name, one in copy.outer._momentum.items())
    with pytest.raises(ConfigError, match="expected a constant of sparseloco"):
        with_scheme(hparams, {"learning_rate.peak": 1})


def test_a_changed_outer_rate_is_constant_unless_its_points_are_given():
    hparams = load_hparams(ROOT / "hparams.json")
    assert hparams.sparseloco.outer_learning_rate_points
    changed = with_scheme(hparams, {"outer_learning_rate": 0.5}).sparseloco
    assert [outer_learning_rate(step, changed) for step in (0, 64, 1000)] == [0.5] * 3
    points = [{"step": 10, "rate": 1.0}]
    changed = with_scheme(hparams, {"outer_learning_rate": 0.5, "outer_learning_rate_points": points}).sparseloco
    assert [outer_learning_rate(step, changed) for step in (0, 5, 1000)] == [0.5, 0.75, 1.0]
    untouched = with_scheme(hparams, {"outer_momentum": 0.9}).sparseloco
    assert untouched.outer_learning_rate_points == hparams.sparseloco.outer_learning_rate_points


def test_all_problems_of_changed_constants_are_named():
    with pytest.raises(ConfigError) as error:
        with_scheme(load_hparams(ROOT / "hparams.json"), {"error_feedback_decay": 2, "expected_share": -1})
    decay, share = error.value.problems
    assert decay.startswith("--with-scheme: sparseloco.error_feedback_decay is 2: ")
    assert share.startswith("--with-scheme: sparseloco.expected_share is -1: ")
    with pytest.raises(ConfigError, match=r"--with-scheme: sparseloco\.outer_nesterov without"):
        with_scheme(load_hparams(ROOT / "hparams.json"), {"outer_nesterov": True})


def test_a_comparison_is_paired():
    found = comparison(7, np.array([1.0, 2.0, 3.0]), np.array([1.1, 2.2, 3.3]))
    assert found.difference == pytest.approx(0.2)
    assert found.error == pytest.approx(0.1 / np.sqrt(3))
    assert found.sequences == 3

"""A run's figures, and each outcome with each way to fail it."""

import json
from dataclasses import replace

import pytest

from tplr.localnet.summary import curve_ends, summarize
from tplr.watch.view import NetworkView

WEIGHTS = {0: {1: 0.25, 2: 0.75}}


def outcome(summary, name):
    return next(one for one in summary.outcomes if one.name == name)


def failed(summary):
    return [one.name for one in summary.outcomes if not one.passed]


def test_a_good_run_passes_with_its_figures(run):
    summary = summarize(run.view(), WEIGHTS, windows=10)
    assert summary.passed
    assert (summary.start_window, summary.windows_done, summary.shared_windows) == (7, 10, 10)
    assert summary.loss_start == pytest.approx(7.6)  # mean of 7.8, 7.6, 7.4
    assert summary.loss_end == pytest.approx(6.2)
    assert "-18.4 %" in outcome(summary, "loss").text
    first = summary.miners[0]
    assert (first.name, first.uid, first.windows_done, first.windows_missed, first.gathered) == (
        "miner-1",
        1,
        10,
        0,
        10,
    )
    assert first.bits_per_parameter == 2.0  # 30,000 bytes over 120,000 parameters
    assert first.score == pytest.approx(0.1)
    assert [miner.weight for miner in summary.miners] == [0.25, 0.75]


def test_it_is_written_as_json(run):
    loaded = json.loads(json.dumps(summarize(run.view(), WEIGHTS, windows=10).to_json()))
    assert loaded["passed"] is True
    assert loaded["miners"][1]["name"] == "miner-2"
    assert [one["name"] for one in loaded["outcomes"]] == ["windows", "loss", "agreement", "weights"]


def test_windows_after_the_last_one_asked_for_do_not_count(run):
    summary = summarize(run.view(), WEIGHTS, windows=4)
    assert summary.windows_done == 4
    assert summary.loss_end == pytest.approx(7.3)  # mean of windows 3 and 4, not of later ones
    assert summary.miners[0].windows_done == 4
    assert summary.miners[0].gathered == 4


def test_a_node_that_is_behind_fails_the_windows(run):
    run.window(11, skip=["miner-2"])
    summary = summarize(run.view(), WEIGHTS, windows=11)
    assert failed(summary) == ["windows"]
    assert "10 of 11" in outcome(summary, "windows").text
    assert "behind: miner-2" in outcome(summary, "windows").text


def test_a_run_that_never_began_fails_everything(recording):
    summary = summarize(recording.view(), {}, windows=10)
    assert failed(summary) == ["windows", "loss", "agreement", "weights"]
    assert summary.start_window is None


@pytest.mark.parametrize("losses", [[8.0, 8.0], [8.0, 7.95], [8.0, 8.4], [8.0, float("nan")]])
def test_a_loss_that_did_not_fall_enough_fails(recording, losses):
    for number, loss in enumerate(losses, 1):
        recording.window(number)
        recording.emit("validator", "baseline", window=recording.start + number - 1, held_out_loss=loss)
    summary = summarize(recording.view(), WEIGHTS, windows=2)
    assert failed(summary) == ["loss"]
    assert "expected -1 % or lower" in outcome(summary, "loss").text


def test_a_loss_that_fell_by_more_than_the_margin_passes(recording):
    for number, loss in enumerate([8.0, 7.91], 1):
        recording.window(number)
        recording.emit("validator", "baseline", window=recording.start + number - 1, held_out_loss=loss)
    assert summarize(recording.view(), WEIGHTS, windows=2).passed


def test_one_measured_window_is_no_fall(recording):
    recording.window(1)
    summary = summarize(recording.view(), WEIGHTS, windows=1)
    assert failed(summary) == ["loss"]


def test_differing_models_fail_and_the_sides_are_named(run):
    run.window(11, fingerprints={"miner-2": "f" * 64})
    summary = summarize(run.view(), WEIGHTS, windows=11)
    assert failed(summary) == ["agreement"]
    assert summary.differing_windows == (17,)
    assert "first in window 17: validator, miner-1 against miner-2" in outcome(summary, "agreement").text


def test_windows_seen_by_one_node_alone_show_no_agreement(recording):
    recording.window(1, skip=["miner-2", "validator"])
    recording.window(2, skip=["miner-2", "validator"])
    assert "agreement" in failed(summarize(recording.view(), WEIGHTS, windows=2))


@pytest.mark.parametrize("weights", [{}, {0: {1: 1.0}}, {0: {1: 1.0, 2: 0.0}}])
def test_a_miner_without_weight_on_chain_fails_by_name(run, weights):
    summary = summarize(run.view(), weights, windows=10)
    assert failed(summary) == ["weights"]
    assert "miner-2" in outcome(summary, "weights").text


def test_weights_are_the_chains_not_those_of_the_validators_events(run):
    summary = summarize(run.view(), {}, windows=10)  # its events say 0.25 and 0.75
    assert [miner.weight for miner in summary.miners] == [0.0, 0.0]


def test_a_miner_must_be_paid_by_every_validator():
    roles = {"validator": "validator", "miner-1": "miner", "validator-2": "validator"}
    view = NetworkView(roles)
    for uid, name in enumerate(roles):
        view.update(name, [{"event": "started", "time": 1.0, "role": roles[name], "uid": uid}])
    for weights, paid in (({0: {1: 1.0}, 2: {1: 0.5}}, 0.5), ({0: {1: 1.0}}, 0.0), ({0: {1: 1.0}, 2: {0: 1.0}}, 0.0)):
        summary = summarize(view, weights, windows=10)
        assert summary.miners[0].weight == paid
        assert ("weights" in failed(summary)) == (paid == 0.0)


def test_lost_windows_are_counted_once_and_only_within_the_run(run):
    run.emit("miner-1", "missed", window=8, reason="too late")  # uploaded, but late
    run.emit("miner-1", "missed", window=30, reason="after the run")
    miner = summarize(run.view(), WEIGHTS, windows=10).miners[0]
    assert (miner.windows_done, miner.windows_missed) == (9, 1)


def test_who_misses_many_windows_without_faults_is_told_what_helps(run):
    run.emit("miner-1", "missed", window=8, reason="not ready")
    assert summarize(run.view(), WEIGHTS, windows=10, window_seconds=8.0).advice == ""
    run.emit("miner-2", "missed", window=9, reason="not ready")
    advice = summarize(run.view(), WEIGHTS, windows=10, window_seconds=8.0).advice
    assert advice.startswith("miners missed 2 of 20 windows")
    assert "for windows of 8 s; --window-seconds 16 gives" in advice
    assert summarize(run.view(), WEIGHTS, windows=10).advice == ""  # chaos


def test_ends_of_a_curve_are_means_that_do_not_meet():
    losses = {window: float(window) for window in range(10, 20)}
    assert curve_ends(losses, range(10, 20)) == (11.0, 18.0)
    assert curve_ends(losses, range(10, 13)) == (10.0, 12.0)
    assert curve_ends(losses, range(10, 11)) == (None, None)
    assert curve_ends({}, range(10, 20)) == (None, None)


def timed(run, seconds):
    """The view of a run whose windows were applied at these times."""
    view = run.view()
    for node in view.nodes.values():
        node.reached = dict(zip(range(7, 7 + len(seconds)), seconds, strict=True))
    return view


def test_who_stalls_for_more_than_three_windows_fails_the_progress(run):
    ten = [8.0 * number for number in range(10)]
    assert "progress" not in [one.name for one in summarize(run.view(), WEIGHTS, windows=10).outcomes]
    summary = summarize(timed(run, ten), WEIGHTS, windows=10, window_seconds=8.0)
    assert summary.passed
    assert outcome(summary, "progress").text.endswith("0.0 windows; windows in a row without an update: 0")
    for late, passes in ((24.0, True), (25.0, False)):  # in addition to a window's own length
        view = timed(run, ten)
        miner = view.nodes["miner-2"]
        miner.reached = {window: time + (late if window > 9 else 0.0) for window, time in miner.reached.items()}
        summary = summarize(view, WEIGHTS, windows=10, window_seconds=8.0)
        assert (failed(summary) == []) == passes
        assert f"miner-2, {late / 8:.1f} windows" in outcome(summary, "progress").text


@pytest.mark.parametrize(
    ("empty", "passes"), [((), True), ((7, 8, 9, 10), True), ((9, 10, 11), True), ((9, 10, 11, 12), False)]
)
def test_more_than_three_windows_in_a_row_without_an_update_fail_unless_they_are_the_first(run, empty, passes):
    view = run.view()
    for node in view.nodes.values():
        for window in empty:
            node.applied[window] = replace(node.applied[window], included=())
    summary = summarize(view, WEIGHTS, windows=10, window_seconds=8.0)
    assert (failed(summary) == []) == passes


def test_what_a_hostile_node_says_counts_for_nothing_but_it_must_have_lied(recording):
    for number in range(1, 11):
        recording.window(number, fingerprints={"miner-2": "f" * 64})
    view = NetworkView({name: node.role for name, node in recording.view().nodes.items()}, hostile={"miner-2"})
    for name, events in recording.events.items():
        view.update(name, events)
    assert failed(summarize(view, {0: {1: 1.0}}, windows=10)) == ["attacks"]
    view.update("miner-2", [{"event": "attacked", "window": 8, "behaviour": "bomb", "key": "a"}] * 2)
    summary = summarize(view, {0: {1: 1.0}}, windows=10)
    assert summary.passed
    assert outcome(summary, "attacks").text == "miner-2 lied 2 times: bomb 2"
    assert [miner.name for miner in summary.miners] == ["miner-1"]
    view.nodes["miner-2"].applied.clear()
    assert view.completed == 10

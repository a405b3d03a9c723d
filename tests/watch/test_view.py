"""Recorded events become the data that display and summary read."""

import pytest

from tplr.watch.view import NetworkView


def test_a_network_without_events_has_done_nothing(recording):
    view = NetworkView({"validator": "validator", "miner-1": "miner"})
    assert view.completed == 0
    assert view.start_window is None
    assert view.nodes["miner-1"].doing == "starting"
    assert view.nodes["miner-1"].uid is None


def test_a_run_is_counted_from_its_start_window(run):
    view = run.view()
    assert view.start_window == 7
    assert view.completed == 10
    assert [miner.name for miner in view.miners] == ["miner-1", "miner-2"]
    assert view.validator.uid == 0


def test_the_slowest_node_says_how_many_windows_are_completed(run):
    run.window(11, skip=["miner-2"])
    assert run.view().completed == 10
    run.window(12, skip=["miner-2", "validator"])
    assert run.view().completed == 10


def test_a_node_that_has_applied_nothing_holds_back_the_count(recording):
    recording.window(1, skip=["validator"])
    assert recording.view().completed == 0


def test_a_node_that_missed_windows_and_caught_up_counts_by_its_newest(recording):
    recording.window(1)
    recording.window(2, skip=["miner-1"])
    recording.window(3)
    assert recording.view().completed == 3


def test_the_order_among_nodes_does_not_matter(run):
    forward = run.view()
    backward = NetworkView({name: forward.nodes[name].role for name in forward.nodes})
    for name in reversed(run.events):
        backward.update(name, run.events[name])
    assert backward.nodes == forward.nodes


def test_events_may_come_in_pieces(run):
    view = NetworkView({name: node.role for name, node in run.view().nodes.items()})
    for name, events in run.events.items():
        for event in events:
            view.update(name, [event])
    assert view.nodes == run.view().nodes


def test_what_a_miner_tells(run):
    miner = run.view().nodes["miner-1"]
    assert miner.window == 16
    assert miner.training_loss[7] == pytest.approx(7.9)
    assert (miner.update_bytes, miner.parameters) == (30_000, 120_000)
    assert miner.applied[16].included == (1, 2)
    assert miner.doing == "next window"


def test_what_a_validator_tells_has_whole_numbers_as_uids(run):
    validator = run.view().validator
    assert validator.scores == {1: 0.1, 2: 0.02}
    assert validator.weights == {1: 0.25, 2: 0.75}
    assert validator.held_out_loss[16] == 6.0


def test_a_window_without_a_batch_has_no_loss(recording):
    recording.emit("miner-1", "trained", window=7, loss=None, batches=0, of_batches=4, tokens=0, seconds=0.1)
    assert recording.view().nodes["miner-1"].training_loss == {}


def test_a_window_of_no_time_has_no_utilisation(recording):
    recording.emit("miner-1", "window_time", window=7, seconds=0.0, training=0.0, waiting={})
    assert recording.view().nodes["miner-1"].utilisation == {}


def test_losses_of_windows_and_problems_are_kept_as_the_last_problem(recording):
    recording.emit("miner-1", "missed", window=9, reason="the upload came 3 s too late")
    assert recording.view().nodes["miner-1"].missed == {9: "the upload came 3 s too late"}
    assert recording.view().nodes["miner-1"].problem == "window 9 missed: the upload came 3 s too late"
    recording.emit("miner-1", "problem", text="state not saved: disk full")
    assert recording.view().nodes["miner-1"].problem == "state not saved: disk full"


def test_unknown_kinds_of_events_are_passed_over(run):
    before = run.view()
    run.emit("miner-1", "something-new", anything=1)
    assert run.view().nodes == before.nodes


def test_differing_fingerprints_are_a_disagreement(run):
    run.window(11, fingerprints={"miner-2": "f" * 64})
    found = run.view().disagreements()
    assert list(found) == [17]
    assert found[17]["miner-1"] == found[17]["validator"] != found[17]["miner-2"]


def test_equal_samples_of_differing_models_are_a_disagreement(recording):
    recording.applied("miner-1", 7, "a" * 64, digest="1" * 64)
    recording.applied("miner-2", 7, "a" * 64, digest="2" * 64)
    assert list(recording.view().disagreements()) == [7]


def test_only_windows_of_two_nodes_can_agree(recording):
    recording.window(1, skip=["miner-2", "validator"])
    view = recording.view()
    assert view.shared_windows() == []
    assert view.disagreements() == {}


def test_what_an_elector_decided_is_an_election_and_its_clock_the_networks(recording):
    recording.emit("validator", "aggregated", window=7, included=[], skipped={}, bytes=0, success_rate=1.0, seconds=0.1)
    for window, block in ((8, 130), (7, 120)):
        recording.emit(
            "miner-1", "pulse", window=window, block=block, block_age=1.0, seconds_left=9.0, window_seconds=16
        )
    view = recording.view()
    assert (list(view.elections), view.elections[7].decided) == ([7], True)
    assert view.clock is not None
    assert (view.clock.window, view.clock.block) == (8, 130)
    assert view.clock.left(now=4.0) == 6.0  # events of this run have time 1.0
    assert view.clock.left(now=99.0) == 0.0


def test_inclusions_are_counted_once_for_each_window(run):
    assert run.view().inclusions(1) == (10, 10)
    assert run.view().inclusions(9) == (0, 0)

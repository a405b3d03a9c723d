"""A window's phases, a validator's links, and the plan's report of an impossible timeline."""

from pathlib import Path

import pytest

from tplr.hparams import load_hparams
from tplr.planner.plan import make_plan
from tplr.training.device import DeviceSettings


def overlapping(hparams):
    return hparams.model_copy(update={"outer_delay": 1})


def test_phases_cover_the_window(sparseloco, demo, host):
    slow = {"down": 9e6, "up": 9e6}
    plans = [make_plan(hparams, host()) for hparams in (sparseloco, demo, overlapping(sparseloco))]
    plans += [make_plan(overlapping(sparseloco), host(**links), mfu=mfu) for links in ({}, slow) for mfu in (0.01, 0.2)]
    for line in (plan.timeline for plan in plans):
        assert (line.phases[0].start, line.phases[-1].stop) == (0.0, pytest.approx(line.window))
        for before, after in zip(line.phases, line.phases[1:], strict=False):
            assert before.stop == pytest.approx(after.start)
        assert line.utilisation == pytest.approx(line.training / line.window)


def test_gathering_takes_what_the_links_need(sparseloco, host):
    hparams = sparseloco.model_copy(update={"manifest_timeout_seconds": 0.0})
    plan = make_plan(hparams, host(up=20e6, down=40e6))
    size = plan.load.update_bytes * 8
    gather = plan.timeline.phases[0]
    assert gather.name == "gather"
    assert gather.seconds == pytest.approx(1 + size / 20e6 + 20 * size / 40e6)  # the list and its reserve


def test_a_published_set_is_waited_for(sparseloco, host):
    line = make_plan(sparseloco, host()).timeline
    wait = next(phase for phase in line.phases if phase.name == "wait for the set")
    assert wait.stop == sparseloco.time_window_delta_seconds + 2


def test_twice_the_devices_need_half_the_time(sparseloco, host):
    one, two = (make_plan(sparseloco, host(ranks=n), mfu=0.1).timeline for n in (1, 2))
    assert one.needed == pytest.approx(2 * two.needed)
    assert one.binds.startswith("data") or one.utilisation > two.utilisation


def test_what_binds(sparseloco, host):
    assert make_plan(sparseloco, host()).timeline.binds.startswith("data")
    assert make_plan(sparseloco, host(), mfu=0.01).timeline.binds.startswith("compute")
    assert make_plan(sparseloco, host(down=3e6), mfu=0.01).timeline.binds.startswith("gather")


@pytest.mark.parametrize(
    ("links", "names"),
    [
        ({"up": 1e6}, "time_window_delta_seconds"),
        ({"down": 1e6}, "no time to train"),
    ],
)
def test_slow_links_are_a_problem_with_its_remedy(sparseloco, host, links, names):
    assert make_plan(sparseloco, host()).problems == []
    assert any(names in problem for problem in make_plan(sparseloco, host(**links)).problems)


def test_with_overlap_devices_train_while_links_are_busy(sparseloco, host):
    """The whole window except packing and applying; a set that arrives after packing is waited for."""
    slow = host(down=20e6)
    in_turn, beside = (make_plan(one, slow, mfu=0.001).timeline for one in (sparseloco, overlapping(sparseloco)))
    assert in_turn.utilisation < 0.9 < 0.99 < beside.utilisation
    pauses = [phase for phase in beside.phases if phase.name != "train"]
    assert [phase.name for phase in pauses] == ["apply", "pack"]
    assert pauses[0].start == pytest.approx(beside.links[1].stop)
    assert pauses[1].start == beside.window - sparseloco.commit_margin_seconds
    waits = overlapping(sparseloco).model_copy(update={"commit_margin_seconds": 1200.0})
    names = [phase.name for phase in make_plan(waits, host(down=10e6), mfu=0.001).timeline.phases]
    assert names == ["train", "pack", "gather", "apply", "train"]


def test_an_offloaded_error_feedback_that_moves_the_weights_is_copied_in_the_pauses(sparseloco, host):
    """Four times 4 bytes of each parameter, at 40 GB/s for each rank."""
    settings = DeviceSettings(offload_error_feedback=True)
    moved = overlapping(sparseloco).model_copy(
        update={"sparseloco": sparseloco.sparseloco.model_copy(update={"expected_share": 0.25})}
    )
    plans = [make_plan(one, host(), mfu=0.001, settings=settings) for one in (overlapping(sparseloco), moved)]
    plain, longer = (
        sum(phase.seconds for phase in plan.timeline.phases if phase.name in ("apply", "pack")) for plan in plans
    )
    assert longer - plain == pytest.approx(16 * plans[0].load.parameters / plans[0].host.ranks / 40e9)


def test_batches_that_end_early_leave_devices_idle_with_overlap_too(sparseloco, host):
    line = make_plan(overlapping(sparseloco), host()).timeline
    assert line.binds.startswith("data")
    assert line.training == pytest.approx(line.needed)
    assert any(phase.name == "idle" for phase in line.phases)


def test_a_set_that_comes_after_the_window_is_a_problem_with_overlap_too(sparseloco, host):
    assert not make_plan(overlapping(sparseloco), host(down=10e6)).problems
    assert any("no time to train" in one for one in make_plan(overlapping(sparseloco), host(down=1e6)).problems)


def test_a_validators_window_has_its_transfers_and_no_training(default, host):
    """Links on which a miner can't train are no problem of a validator that has the whole window for its bytes."""
    plan = make_plan(default, host(up=3e6), role="validator")
    line, flow = plan.timeline, plan.traffic
    assert make_plan(default, host(up=3e6)).problems
    assert plan.problems == []
    assert (line.phases, line.needed, line.utilisation) == ((), 0.0, 0.0)
    assert [(one.name, one.start) for one in line.links] == [("upload", 0.0), ("download", 0.0)]
    assert [one.seconds for one in line.links] == pytest.approx([flow.uploaded * 8 / 3e6, flow.downloaded * 8 / 500e6])


@pytest.mark.parametrize(
    ("name", "attribute", "link"), [("upload", "uploaded", "up"), ("download", "downloaded", "down")]
)
def test_a_validators_bytes_that_exceed_its_link_are_a_problem(sparseloco, host, name, attribute, link):
    plan = make_plan(sparseloco, host(), role="validator")
    needed = getattr(plan.traffic, attribute) * 8 / plan.timeline.window
    assert make_plan(sparseloco, host(**{link: 1.01 * needed}), role="validator").problems == []
    (problem,) = make_plan(sparseloco, host(**{link: 0.99 * needed}), role="validator").problems
    assert problem.startswith(f"the {name} of ")
    assert "use a link of at least" in problem


def test_a_validator_of_70b_needs_a_faster_upload_than_a_miner(host):
    hparams = load_hparams(Path(__file__).parents[2] / "hparams-70b.json")
    machine = {"gpu": "b200", "ranks": 8, "host_memory": 2**41, "disk": 2**42}
    settings = DeviceSettings.of("cuda", checkpointing="full", offload_weights=True, offload_error_feedback=True)
    (problem,) = make_plan(hparams, host(**machine), role="validator", settings=settings).problems
    assert problem == (
        "the upload of 28999 MB in a window takes 2109 s at 110 Mbit/s, a window has 1200 s: use a link of at least "
        "194 Mbit/s, or raise blocks_per_window"
    )
    assert make_plan(hparams, host(**machine, up=194e6), role="validator", settings=settings).problems == []

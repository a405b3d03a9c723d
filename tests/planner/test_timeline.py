"""A window's phases, and what a plan says that cannot work."""

import pytest

from tplr.planner import make_plan


def test_phases_cover_the_window(sparseloco, demo, host):
    for hparams in (sparseloco, demo):
        line = make_plan(hparams, host()).timeline
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
    assert gather.seconds == pytest.approx(1 + size / 20e6 + 15 * size / 40e6)


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

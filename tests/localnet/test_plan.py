"""Arguments of a localnet: all problems are reported at once, each with its remedy."""

import argparse
import dataclasses
import os
import re
import socket
from typing import get_args

import pytest

from tplr.errors import ConfigError
from tplr.hparams import HParams, load_hparams
from tplr.localnet.plan import (
    BLOCK_SECONDS,
    MIN_SMALL_WINDOW_SECONDS,
    PROFILE,
    WINDOWS_FOR_PROBATION,
    Scheme,
    add_arguments,
    claim_run_dir,
    fewest_windows,
    make_plan,
    needed_bytes,
    scheme_constants,
)
from tplr.node.start_checks import check_window


@pytest.fixture(autouse=True)
def in_a_fresh_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def problems(**arguments):
    with pytest.raises(ConfigError) as refused:
        make_plan(**arguments)
    return refused.value.problems


def test_the_default_is_a_new_folder_below_runs(tmp_path):
    plan = make_plan()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ", plan.run_dir.name)
    assert plan.run_dir.parent == tmp_path / "runs"
    assert plan.latest == tmp_path / "runs" / "latest"
    assert not plan.run_dir.exists()  # planning creates nothing
    assert list(tmp_path.iterdir()) == []


def test_two_runs_in_one_second_have_two_folders(monkeypatch):
    monkeypatch.setattr("time.gmtime", lambda: (2026, 1, 2, 3, 4, 5, 0, 0, 0))
    one, other = make_plan(), make_plan()  # both before a folder exists
    first = claim_run_dir(one).run_dir
    assert first == one.run_dir == other.run_dir
    assert claim_run_dir(other).run_dir.name == f"{first.name}-2"
    assert make_plan().run_dir.name == f"{first.name}-3"
    own = make_plan(run_dir=first)
    assert claim_run_dir(own) == own


def test_a_folder_of_ones_own_gets_no_link(tmp_path):
    plan = make_plan(run_dir=tmp_path / "mine")
    assert (plan.run_dir, plan.latest) == (tmp_path / "mine", None)


def test_the_commands_defaults_are_the_plans():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    from_command = make_plan(**vars(parser.parse_args([])))
    assert (from_command.miners, from_command.windows, from_command.keep) == (3, 20, "all")
    assert from_command.window_seconds == 8.0
    profile = load_hparams(PROFILE)
    assert from_command.blocks_per_window == profile.blocks_per_window
    assert (from_command.vocab_size, from_command.seed) == (profile.model.vocab_size, profile.init_seed)


def test_the_windows_length_is_counted_in_blocks():
    assert make_plan(window_seconds=7.5).blocks_per_window == 15


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"miners": 0}, "--miners 0"),
        ({"miners": 256, "windows": 99}, "--miners 256: expected 1 to 255"),
        ({"miners": 254, "windows": 99, "validators": 3}, "--miners 254: expected 1 to 253"),
        ({"small": True}, "--window-seconds 8: expected at least 40 with --small"),
        ({"byzantine": "leader", "validators": 3}, "--window-seconds 8: expected at least 16 with --byzantine"),
        ({"byzantine": "leader", "window_seconds": 16.0}, "--validators 1: expected at least 3 with --byzantine"),
        (
            {"byzantine": "aggregator", "validators": 3, "chaos": True, "window_seconds": 16.0},
            "--byzantine: expected without --chaos",
        ),
        (
            {"byzantine": "leader", "validators": 3, "ranks": 2, "window_seconds": 16.0},
            "--ranks 2: expected 1 with --byzantine",
        ),
        ({"validators": 0}, "--validators 0: expected 1 to 8"),
        ({"validators": 9}, "--validators 9: expected 1 to 8"),
        ({"windows": 1}, "--windows 1: expected at least 2"),
        ({"window_seconds": 3.5}, "--window-seconds 3.5"),
        ({"window_seconds": 8.2}, "--window-seconds 8.2"),
        ({"window_seconds": float("nan")}, "--window-seconds nan"),
        ({"window_seconds": float("inf")}, "--window-seconds inf"),
        ({"vocab_size": 256}, "--vocab-size 256"),
        ({"seed": -1}, "--seed -1"),
        ({"ranks": 0}, "--ranks 0"),
        ({"outer_delay": 1, "scheme": "demo"}, "--outer-delay 1: expected 0 with --scheme demo"),
        ({"ranks": 2, "chaos": True}, "--ranks 2: expected 1 with --chaos"),
        ({"port": -1}, "--port -1"),
        ({"port": 65536}, "--port 65536"),
    ],
)
def test_a_value_out_of_bounds_is_named(arguments, named):
    (problem,) = problems(**arguments)
    assert problem.startswith(named)


def test_every_miner_has_to_be_tested_and_in_a_long_run_to_prove_itself():
    profile = load_hparams(PROFILE)
    short, long = make_plan(windows=WINDOWS_FOR_PROBATION - 1), make_plan(windows=WINDOWS_FOR_PROBATION)
    assert fewest_windows(short, profile) == 2
    # Two windows of probation, two until they are scored, two until the list is effective, and two of pay.
    assert fewest_windows(long, profile) == 8
    crowded = dataclasses.replace(long, miners=3 * profile.uids_per_window + 1)
    assert fewest_windows(crowded, profile) == 6 + 4
    (problem,) = problems(miners=3, windows=1)
    assert problem.startswith("--windows 1: expected at least 2")


def test_all_problems_come_at_once(tmp_path):
    found = problems(miners=0, windows=0, port=70000, corpus=tmp_path / "none", seed=-1)
    assert [problem.split()[0] for problem in found] == ["--miners", "--windows", "--seed", "--corpus", "--port"]


def test_a_port_in_use_is_named_with_the_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (problem,) = problems(port=port)
    assert f"--port {port}: Address already in use" in problem
    assert "0 for a free one" in problem
    assert make_plan(port=port).port == port  # free again


def test_a_corpus_must_be_a_folder(tmp_path):
    (tmp_path / "text.txt").write_text("not a folder")
    (problem,) = problems(corpus=tmp_path / "text.txt")
    assert "no such folder" in problem
    (tmp_path / "texts").mkdir()
    assert make_plan(corpus=tmp_path / "texts").corpus == tmp_path / "texts"


def test_a_run_needs_a_folder_of_its_own(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    assert make_plan(run_dir=mine).run_dir == mine  # empty is fine
    (mine / "something").touch()
    (problem,) = problems(run_dir=mine)
    assert "is not empty" in problem


def test_a_file_is_no_place_for_a_run(tmp_path):
    (tmp_path / "file").touch()
    assert "is a file" in problems(run_dir=tmp_path / "file")[0]
    assert "is a file" in problems(run_dir=tmp_path / "file" / "below")[0]


def test_a_folder_that_can_not_be_written_is_named(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    # root may write everywhere but to /proc
    place = closed / "run" if os.geteuid() else "/proc/run"
    (problem,) = problems(run_dir=type(tmp_path)(place))
    assert "can't write to" in problem


def test_a_full_disk_is_seen_before_anything_is_begun(tmp_path):
    asked = []

    def almost_full(folder):
        asked.append(folder)
        return 5 * 2**20

    (problem,) = problems(run_dir=tmp_path / "new" / "run", free_bytes=almost_full)
    assert "5 MiB free" in problem
    assert asked == [tmp_path]  # the nearest folder that exists


def test_what_is_needed_grows_with_what_is_asked():
    profile = load_hparams(PROFILE)
    needed = needed_bytes(make_plan(), profile)
    assert needed < needed_bytes(make_plan(miners=12), profile)
    assert needed < needed_bytes(make_plan(vocab_size=50_000), profile)
    assert make_plan(free_bytes=lambda _: needed)
    assert problems(free_bytes=lambda _: needed - 1)


def test_the_disk_here_is_really_asked():
    (problem,) = problems(miners=255, windows=10**9)
    assert problem.startswith("disk of ")


def test_the_extra_that_draws_is_asked_for_at_start(monkeypatch):
    monkeypatch.setattr("tplr.localnet.plan.find_spec", lambda _: None)
    assert problems() == ("matplotlib, which draws loss.png, is not installed: .venv/bin/pip install -e '.[localnet]'",)


@pytest.mark.parametrize("scheme", get_args(Scheme))
def test_a_small_run_has_a_smaller_model_and_the_schemes_constants(scheme: Scheme) -> None:
    usual, small = (HParams.model_validate(scheme_constants(scheme, small=one)) for one in (False, True))
    assert small.model.hidden_size < usual.model.hidden_size
    assert small.outer == usual.outer
    plan = make_plan(small=True, window_seconds=MIN_SMALL_WINDOW_SECONDS, scheme=scheme)
    check_window(small.model_copy(update={"blocks_per_window": plan.blocks_per_window}), BLOCK_SECONDS)

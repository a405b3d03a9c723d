"""Resources that follow from a machine, their overrides, and the source of the machine's limits."""

import os
from dataclasses import astuple
from pathlib import Path

import pytest

from tplr.errors import ConfigError
from tplr.resources import NO_LIMIT, LocalMachine, Resources, available_cores, cgroup_cores, cgroup_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("machine", "expected"),  # transfers, data threads, tensor threads, parts of checkpoints, peers of a gather
    [
        (LocalMachine(cores=2, memory=24 * GIB), (8, 2, 2, 4, 64)),
        (LocalMachine(cores=2, memory=24 * GIB, device="cuda"), (8, 2, 2, 4, 64)),
        (LocalMachine(cores=1, memory=2 * GIB), (8, 1, 1, 4, 64)),
        (LocalMachine(cores=1, memory=GIB // 4), (4, 1, 1, 4, 16)),
        (LocalMachine(cores=1, memory=GIB // 32), (1, 1, 1, 2, 2)),
        (LocalMachine(cores=4, memory=GIB // 2), (8, 2, 4, 8, 32)),
        (LocalMachine(cores=4, memory=16 * GIB), (16, 4, 4, 8, 128)),
        (LocalMachine(cores=4, memory=16 * GIB, device="cuda"), (16, 3, 4, 8, 128)),
        (LocalMachine(cores=16, memory=128 * GIB, device="cuda"), (32, 15, 16, 16, 128)),
        (LocalMachine(cores=192, memory=2048 * GIB, device="cuda"), (32, 16, 192, 16, 128)),
    ],
)
def test_resources_follow_cores_memory_and_device(machine, expected):
    assert astuple(Resources.of(machine)) == expected
    assert Resources.choose(machine, {}) == Resources.of(machine)


def test_each_can_be_set():
    machine = LocalMachine(cores=4, memory=16 * GIB)
    names = {"TPLR_TRANSFERS": "5", "TPLR_DATA_THREADS": "7", "TPLR_TENSOR_THREADS": "9"}
    names |= {"TPLR_CHECKPOINT_PARTS": "2", "TPLR_GATHER_PEERS": "200"}
    assert astuple(Resources.choose(machine, names)) == (5, 7, 9, 2, 200)
    assert astuple(Resources.choose(machine, {"TPLR_DATA_THREADS": "7"}, transfers=3)) == (3, 7, 4, 8, 128)
    assert Resources.choose(machine, {"TPLR_TRANSFERS": "5"}, transfers=3).transfers == 5
    assert Resources.choose(machine, {"OMP_NUM_THREADS": "1"}).tensor_threads == 1
    assert Resources.choose(machine, {"OMP_NUM_THREADS": "1", "TPLR_TENSOR_THREADS": "2"}).tensor_threads == 2
    assert Resources.choose(machine, {"OMP_NUM_THREADS": "4,2", "TPLR_TRANSFERS": ""}) == Resources.of(machine)


def test_wrong_values_are_listed_together():
    names = {"TPLR_TRANSFERS": "0", "TPLR_DATA_THREADS": "many", "TPLR_TENSOR_THREADS": "-1"}
    with pytest.raises(ConfigError) as caught:
        Resources.choose(LocalMachine(cores=2, memory=GIB), names)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        f"{name} is {value!r}" for name, value in names.items()
    ]


def test_one_line_says_what_was_chosen():
    machine = LocalMachine(cores=4, memory=16 * GIB, device="cuda")
    line = Resources.of(machine).describe(machine)
    assert line == (
        "4 cores, 16 GiB, device cuda: 16 transfers, 3 data threads, 4 tensor threads, 8 checkpoint parts, 128 peers"
    )


def groups(folder: Path, own: str, **settings: str) -> dict[str, Path]:
    """Control groups below ``folder``; names of ``settings`` have ``__`` for ``/``."""
    for name, text in settings.items():
        path = folder.joinpath(*name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (folder / "own").write_text(own)
    return {"root": folder, "own": folder / "own"}


def test_limits_of_control_groups_version_2(tmp_path):
    files = {"cpu.max": "max 100000", "pod__cpu.max": "250000 100000", "pod__box__cpu.max": "max 100000"}
    files |= {"pod__memory.max": str(GIB), "pod__box__memory.max": "max"}
    at = groups(tmp_path, "0::/pod/box\n", **files)
    assert (cgroup_cores(**at), cgroup_memory(**at)) == (3, GIB)
    at = groups(tmp_path, "0::/elsewhere\n")
    assert (cgroup_cores(**at), cgroup_memory(**at)) == (NO_LIMIT, NO_LIMIT)


def test_limits_of_control_groups_version_1(tmp_path):
    files = {"cpu__box__cpu.cfs_quota_us": "150000", "cpu__box__cpu.cfs_period_us": "100000"}
    files |= {"cpu__cpu.cfs_quota_us": "-1", "cpu__cpu.cfs_period_us": "100000"}
    files |= {"memory__memory.limit_in_bytes": str(2 * GIB)}
    at = groups(tmp_path, "4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n", **files)
    assert (cgroup_cores(**at), cgroup_memory(**at)) == (2, 2 * GIB)


def test_no_control_groups(tmp_path):
    assert cgroup_cores(tmp_path, tmp_path / "none") == cgroup_memory(tmp_path, tmp_path / "none") == NO_LIMIT


def test_this_machine(monkeypatch):
    here = LocalMachine.here("cuda")
    assert 1 <= here.cores <= (os.cpu_count() or 1)
    assert 2**26 < here.memory < 2**50
    assert here.device == "cuda"
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert available_cores() == 1


@pytest.mark.parametrize("value", ["0", "-2", "many"])
def test_a_wrong_number_of_local_processes_is_reported_with_other_problems(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    machine = LocalMachine.here()
    assert machine.cores >= 1
    with pytest.raises(ConfigError) as refused:
        Resources.choose(machine, {"LOCAL_WORLD_SIZE": value, "TPLR_TRANSFERS": "0"})
    expected = f"LOCAL_WORLD_SIZE is {value!r}: expected the number of processes on this machine"
    assert [problem.startswith(expected) for problem in refused.value.problems] == [False, True]

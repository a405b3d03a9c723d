"""Two ranks of one miner on the CPU: the update of a single process, and nobody waits for a rank that failed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("two_ranks.py")


@pytest.fixture(scope="module")
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_ranks_send_what_one_process_would_and_survive_each_others_failures(tiny, tmp_path, free_port):
    paths = []
    for scheme, changes in (("demo", {}), ("sparseloco", {"inner_steps": 2, "batches_per_inner_step": 3})):
        paths.append(tmp_path / f"{scheme}.json")
        paths[-1].write_text(tiny(scheme, **changes).model_dump_json())
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, *paths],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
            | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        (out, errors), (_, more_errors) = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert out, errors
    assert ranks[1].returncode == 9, more_errors
    results = json.loads(out.splitlines()[-1])
    windows = results["demo"] + results["sparseloco"]
    failures = [index for index, window in enumerate(windows) if "failed" in window]
    # Rank 1 where moments are put together, rank 1 in a forward pass, rank 0 in a backward pass, rank 1 in a backward
    # pass, rank 0 where it sends the weights, rank 1 where numbers are added up, rank 1 after the last collective, and
    # then it dies.
    assert failures == [2, 4, 5, 6, 7, 8, 9, 11], errors
    assert all(windows[index]["failed"] in ("RankFailed", "TrainingError") for index in failures[:-1])
    assert all(windows[index]["seconds"] < 60 for index in failures)  # nobody waited for a time-out
    for index in {*range(12)} - {*failures}:
        window = windows[index]
        assert window["train_stats"] == window["expected"]
        assert window["train_stats"]["batches"] == 5
        # Sums in another order: float32's rounding, through AdamW's quotient of two small numbers.
        assert window["work_apart"] < 1e-4
        assert window["update_apart"] < 1e-2
        assert window["bytes_apart"] < 0.05
        assert window["weights_untouched"]

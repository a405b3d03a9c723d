"""The container's entrypoint as a shell script: processes, signals, and the effect of each exit status."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Replaces ``tplr``: prints its arguments, and then acts as the test requires.
PROGRAM = '#!/bin/sh\necho "called: $*"\n'


class Container:
    """A folder with a program, and the entrypoint started on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        program = self.folder / "tplr"
        program.write_text(PROGRAM + script)
        program.chmod(0o755)
        return subprocess.Popen(
            [ROOT / "docker/entrypoint.sh", *arguments],
            env={"PATH": f"{self.folder}:{os.environ['PATH']}", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: str, **variables: str) -> tuple[int, str]:
        process = self.start(script, *arguments, **variables)
        said, _ = process.communicate()
        return process.returncode, said.strip()


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_one_gpu_is_one_process_and_several_are_ranks(container: Container) -> None:
    assert container.run("", "miner", "--netuid", "3", GPUS="1") == (0, "called: miner --netuid 3")
    assert container.run("", "miner", "--netuid", "3", GPUS="4") == (0, "called: miner --ranks 4 --netuid 3")
    assert container.run("", "aggregator", GPUS="4") == (0, "called: aggregator")
    assert container.run("", "miner", GPUS="1", MORE_OPTIONS="--debug --ranks 2") == (
        0,
        "called: miner --debug --ranks 2",
    )


def test_gpus_are_counted(container: Container) -> None:
    (container.folder / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: a (UUID: 1)'\necho 'GPU 1: b (UUID: 2)'\n")
    (container.folder / "nvidia-smi").chmod(0o755)
    assert container.run("", "validator") == (0, "called: validator --ranks 2")


def test_other_commands_pass_through(container: Container) -> None:
    assert container.run("exit 7", "doctor", "--role", "miner") == (7, "called: doctor --role miner")


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_nodes_status_is_the_containers(container: Container, status: int) -> None:
    assert container.run(f"exit {status}", "miner", GPUS="1")[0] == status


def test_a_signal_reaches_the_node_and_waits_for_its_end(container: Container) -> None:
    script = "trap 'echo ending; exit 5' TERM\necho ready\nwhile :; do sleep 0.05; done\n"
    process = container.start(script, "miner", GPUS="1")
    assert process.stdout
    assert [process.stdout.readline() for _ in range(2)] == ["called: miner\n", "ready\n"]
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[0] == "ending\n"
    assert process.returncode == 5


def test_a_misconfigured_node_is_not_started_again_and_again(container: Container) -> None:
    process = container.start("exit 2", "miner", GPUS="1", HOLD_STATUSES="2 4")
    assert process.stderr
    assert "exit status 2: correct what is listed above" in process.stderr.readline()
    time.sleep(0.3)
    assert process.poll() is None  # to the restart policy the container is running
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 2


def test_what_is_down_outside_is_given_time(container: Container) -> None:
    assert container.run("exit 3", "miner", GPUS="1", RETRY_SECONDS="0")[0] == 3
    process = container.start("exit 3", "miner", GPUS="1", RETRY_SECONDS="600")
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 3


def test_health_is_a_recent_event(tmp_path: Path) -> None:
    def healthy(**variables: str) -> bool:
        env = {"PATH": os.environ["PATH"], "EVENTS": str(tmp_path / "events.jsonl"), **variables}
        return subprocess.run([ROOT / "docker/health.sh"], env=env, check=False).returncode == 0

    assert not healthy()
    (tmp_path / "events.jsonl").touch()
    assert healthy()
    os.utime(tmp_path / "events.jsonl", (time.time() - 100, time.time() - 100))
    assert healthy()
    assert not healthy(MAX_SILENCE_SECONDS="50")

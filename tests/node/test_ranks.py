"""Processes of ``torchrun`` that hold one model: their number, their devices, and the effect of a failed rank."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rank_processes import run_ranks, torchrun

from tplr.cli import parse_arguments
from tplr.config import Environment
from tplr.errors import ConfigError
from tplr.exchange.snapshot import MANIFEST
from tplr.localnet.plan import scheme_constants
from tplr.node.arguments import node_arguments
from tplr.node.checks import MISCONFIGURED, Checks
from tplr.node.main import main
from tplr.node.ranks import CHECKS_SECONDS, joined_ranks, with_rank_device
from tplr.node.train_state import TrainState
from tplr.training.commands import command

COMMANDS = [
    "_train",
    "_continue_training",
    "pack",
    "restore_update",
    "own_applied",
    "apply",
    "fingerprint",
    "outer_fingerprint",
    "digest",
    "set_caps",
    "align",
    "middle_alignment",
    "own_alignment",
    "baseline",
    "evaluate",
    "save",
    "begin_save",
    "end_save",
    "_restore",
    "_restore_shared",
    "_restore_first_weights",
    "reset_to_first_weights",
]
HOW = ("raises", "dies", "hangs")
TIMEOUT = 5.0  # seconds


def arguments(role: str):
    return node_arguments(parse_arguments([role, "--device", "cpu"]))


@pytest.mark.parametrize(
    ("device", "local_rank", "own"),
    [("cuda", "3", "cuda:3"), ("cuda", None, "cuda"), ("cuda:1", "3", "cuda:1"), ("cpu", "3", "cpu")],
)
def test_each_process_of_a_machine_has_a_gpu_of_its_own(device, local_rank, own) -> None:
    environment = Environment({"LOCAL_RANK": local_rank} if local_rank else {})
    assert with_rank_device(node_arguments(parse_arguments(["miner", "--device", device])), environment).device == own


@pytest.mark.parametrize(("role", "size"), [("miner", None), ("miner", "1"), ("validator", "1"), ("aggregator", None)])
def test_a_single_process_joins_no_group(role, size) -> None:
    with joined_ranks(arguments(role), Environment({"WORLD_SIZE": size} if size else {}), Checks()) as commands:
        assert commands is None


def test_a_role_that_has_no_use_for_ranks_is_refused_at_start(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ConfigError, match="WORLD_SIZE is 2: an aggregator is one process"),
        joined_ranks(arguments("aggregator"), Environment({"WORLD_SIZE": "2"}), Checks()),
    ):
        pass
    assert main(arguments("aggregator")) == MISCONFIGURED


def test_a_rank_without_a_device_is_reported_with_all_other_problems(monkeypatch) -> None:
    """By the start-up checks of rank 0; another rank leaves it the time to report its problems first."""
    waits: list[float] = []
    monkeypatch.setattr("tplr.node.ranks.time.sleep", waits.append)
    args, env = node_arguments(parse_arguments(["miner", "--device", "cuda:77"])), {"WORLD_SIZE": "2"}
    checks = Checks()
    with joined_ranks(args, Environment(env | {"RANK": "0"}), checks) as commands:
        assert commands is None
    assert [(one.check, one.text[:16]) for one in checks.problems] == [("device", "--device cuda:77")]
    assert waits == []
    with (
        pytest.raises(ConfigError, match="--device cuda:77"),
        joined_ranks(args, Environment(env | {"RANK": "1"}), Checks()),
    ):
        pass
    assert waits == [CHECKS_SECONDS]


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR expected, but not set: start the ranks with torchrun"),
        ({"WORLD_SIZE": "1", "TPLR_LOCALNET_KILL_AT": "packed:x"}, "TPLR_LOCALNET_KILL_AT is 'packed:x'"),
    ],
)
def test_wrong_variables_are_a_wrong_configuration(variables, problem, monkeypatch, caplog) -> None:
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tplr.node.main.setup_logging", lambda **_: None)  # it would outlive the test
    assert main(arguments("miner")) == MISCONFIGURED
    assert problem in caplog.text


@pytest.fixture(scope="module")
def hparams(tmp_path_factory) -> str:
    raw = scheme_constants("sparseloco")
    raw["model"] |= {"vocab_size": 67, "hidden_size": 16, "intermediate_size": 30, "num_hidden_layers": 1}
    raw["sparseloco"] |= {"inner_steps": 2, "batches_per_inner_step": 3, "outer_momentum": 0.5}
    raw |= {"target_chunk": 16, "topk_compression": 16}
    path = tmp_path_factory.mktemp("hparams") / "hparams.json"
    path.write_text(json.dumps(raw))
    return str(path)


@pytest.fixture(scope="module")
def expected(hparams, tmp_path_factory) -> dict[str, str]:
    """Digest of each window that a single process saves."""
    place = tmp_path_factory.mktemp("expected")
    (found,) = run_ranks(1, place, "walk", **_where(hparams, place), timeout=60).results
    return found


def _where(hparams: str, place: Path) -> dict[str, str]:
    return {"hparams": hparams, "folder": str(place / "state")}


def check_failure(tmp_path: Path, hparams: str, expected: dict[str, str], fault: tuple[str, int, str], size: int):
    """All ranks end within the timeout, with an error; the newest snapshot is complete, and a restart resumes from
    it."""
    at, rank, how = fault
    place = tmp_path / f"{at}-{size}-{how}"
    where = _where(hparams, place)
    stopped = rank if how == "hangs" else None  # torchrun ends it when another rank has ended
    ended = run_ranks(size, place, "walk", stopped=stopped, fault=fault, timeout=TIMEOUT, **where)
    logs = "\n".join(ended.logs)
    for other, code in enumerate(ended.codes):
        assert code == {"raises": 1, "dies": -9, "hangs": None}[how] if other == rank else code == 1, (other, logs)
    assert "all ranks restart" in logs
    if how == "raises":
        assert "ValueError: scripted" in ended.logs[rank]
    complete = [one.parent.name for one in (place / "state").glob(f"window-*/{MANIFEST}")]
    if COMMANDS.index(at) <= COMMANDS.index("save"):
        assert complete == ["window-0"]
    again = run_ranks(size, place / "again", "newest", **where)
    assert again.codes == [0] * size, "\n".join(again.logs)
    window = max(int(name.removeprefix("window-")) for name in complete)
    assert again.results[0] == {"window": window, "digest": expected[str(window)]}


def test_every_command_is_tested() -> None:
    code = command(lambda _: None).__code__
    found = [name for name, one in vars(TrainState).items() if getattr(one, "__code__", None) is code]
    assert sorted(found) == sorted(COMMANDS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("at", "rank", "how", "size"),
    [
        ("_train", 0, "raises", 2),
        ("restore_update", 1, "dies", 4),
        ("apply", 0, "hangs", 2),
        ("save", 1, "dies", 2),
        ("end_save", 1, "raises", 2),
        ("_restore", 0, "dies", 2),
    ],
)
def test_a_failed_rank_ends_all_and_costs_no_more_than_the_window(at, rank, how, size, hparams, expected, tmp_path):
    """Only steps between which the state on disk differs; the long test has every command and failure."""
    check_failure(tmp_path, hparams, expected, (at, rank, how), size)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_may_fail_at_each_command(size, how, hparams, expected, tmp_path) -> None:
    with ThreadPoolExecutor(4) as pool:  # hanging ranks only wait
        cases = [
            pool.submit(check_failure, tmp_path, hparams, expected, (at, index % size, how), size)
            for index, at in enumerate(COMMANDS)
        ]
    for case in cases:
        case.result()


@pytest.mark.timeout(300)
def test_torchrun_starts_the_ranks_again_and_they_go_on_with_the_same_model(hparams, tmp_path) -> None:
    """A rank is killed while it trains in the third window: torchrun restarts all, and that window is done again."""
    (alone,) = run_ranks(
        1, tmp_path / "alone", "restarted", **_where(hparams, tmp_path / "alone"), windows=4, dies_in=-1
    ).results
    result = tmp_path / "result.json"
    call = json.dumps({**_where(hparams, tmp_path), "windows": 4, "dies_in": 2})
    torchrun(2, "restarted", call, str(result), max_restarts=3)
    assert json.loads(result.read_text()) == {"life": 1, "first": 2, "digest": alone["digest"]}

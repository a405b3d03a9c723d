"""Which processes of ``torchrun`` hold a model together, on which device each, and what a failed rank costs."""

import json
from pathlib import Path

import pytest
from rank_processes import run_ranks

from tplr.cli import parse_arguments
from tplr.config import Environment
from tplr.errors import ConfigError
from tplr.exchange.snapshot import MANIFEST
from tplr.node.arguments import node_arguments
from tplr.node.checks import MISCONFIGURED
from tplr.node.main import main
from tplr.node.ranks import joined_ranks, with_rank_device

LOCALNET = Path(__file__).parents[2] / "src/tplr/localnet"
COMMANDS = [
    "_train",
    "pack",
    "restore_update",
    "own_applied",
    "apply",
    "fingerprint",
    "digest",
    "baseline",
    "evaluate",
    "save",
    "_restore",
    "_restore_shared",
    "reset_to_first_weights",
]
TIMEOUT = 15.0  # seconds


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
    with joined_ranks(arguments(role), Environment({"WORLD_SIZE": size} if size else {})) as commands:
        assert commands is None


def test_a_role_that_has_no_use_for_ranks_is_refused_at_start(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ConfigError, match="WORLD_SIZE is 2: an aggregator is one process"),
        joined_ranks(arguments("aggregator"), Environment({"WORLD_SIZE": "2"})),
    ):
        pass
    assert main(arguments("aggregator")) == MISCONFIGURED


@pytest.fixture
def hparams(tmp_path) -> str:
    raw = json.loads((LOCALNET / "hparams.json").read_text())
    del raw["_"], raw[raw["outer"]]
    raw |= json.loads((LOCALNET / "sparseloco.json").read_text())
    del raw["_"]
    raw["model"] |= {"vocab_size": 67, "hidden_size": 16, "intermediate_size": 30, "num_hidden_layers": 1}
    raw["sparseloco"] |= {"inner_steps": 2, "batches_per_inner_step": 3, "outer_momentum": 0.5}
    raw |= {"target_chunk": 16, "topk_compression": 16}
    path = tmp_path / "hparams.json"
    path.write_text(json.dumps(raw))
    return str(path)


def check_failure(tmp_path: Path, hparams: str, at: str, size: int, rank: int, how: str) -> None:
    """All ranks end within the timeout, with an error; the newest snapshot is whole, and a restart goes on from it."""
    place, folder = tmp_path / f"{at}-{how}", tmp_path / f"{at}-{how}" / "state"
    where = {"hparams": hparams, "folder": str(folder)}
    stopped = rank if how == "hangs" else None  # torchrun ends it when another rank has ended
    ended = run_ranks(size, place, "faulty", stopped=stopped, at=at, rank=rank, how=how, timeout=TIMEOUT, **where)
    logs = "\n".join(ended.logs)
    for other, code in enumerate(ended.codes):
        assert code == {"raises": 1, "dies": -9, "hangs": None}[how] if other == rank else code == 1, (other, logs)
    assert "all ranks end and start again" in logs
    if how == "raises":
        assert "ValueError: scripted" in ended.logs[rank]
    complete = [one.parent.name for one in folder.glob(f"window-*/{MANIFEST}")]
    if COMMANDS.index(at) <= COMMANDS.index("save"):
        assert complete == ["window-0"]
    again = run_ranks(size, place / "again", "newest", **where)
    assert again.codes == [0] * size, "\n".join(again.logs)
    alone = run_ranks(1, place / "alone", "newest", **where)
    assert again.results[0] == alone.results[0]
    assert again.results[0]["window"] is not None


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("at", "size", "rank", "how"),
    [("_train", 2, 1, "hangs"), ("apply", 4, 2, "dies"), ("evaluate", 2, 0, "raises"), ("save", 2, 1, "dies")],
)
def test_a_failed_rank_ends_all_and_costs_no_more_than_the_window(at, size, rank, how, hparams, tmp_path) -> None:
    check_failure(tmp_path, hparams, at, size, rank, how)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("how", ["raises", "dies", "hangs"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_may_fail_at_each_command(size, how, hparams, tmp_path) -> None:
    for index, at in enumerate(COMMANDS):
        check_failure(tmp_path, hparams, at, size, index % size, how)

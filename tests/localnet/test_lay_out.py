"""A run's folder, read with the code that nodes use."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from dotenv import find_dotenv

from tplr.chain.hotkeys import load_hotkey
from tplr.chain.local import LocalChain
from tplr.cli import parse_arguments
from tplr.config import Environment, load_bucket_secrets
from tplr.errors import ConfigError
from tplr.hparams import load_hparams
from tplr.localnet import network as network_module
from tplr.localnet.network import (
    HOTKEY,
    MIN_STAKE,
    NETUID,
    base_environment,
    create_chain,
    forget_working_files,
    lay_out,
    node_command,
    node_environment,
    storage_command,
)
from tplr.localnet.plan import BLOCK_SECONDS, MAX_VALIDATORS, MIN_WINDOW_SECONDS, Byzantine, Scheme, make_plan
from tplr.node.arguments import node_arguments
from tplr.node.start_checks import check_window
from tplr.testing.s3server.keys import KeyTable


@pytest.fixture
def prepared(tmp_path):
    """Replaces a prepared corpus; only its tokenizer's folder matters here."""
    (tmp_path / "prepared" / "tokenizer").mkdir(parents=True)
    (tmp_path / "prepared" / "tokenizer" / "tokenizer.json").write_text("{}")
    return tmp_path / "prepared"


@pytest.fixture
def make(tmp_path, monkeypatch, prepared):
    monkeypatch.chdir(tmp_path)
    return lambda **arguments: lay_out(make_plan(**({"miners": 2} | arguments)), prepared)


def test_the_newest_run_is_linked(make, tmp_path):
    first = make().folder
    second = make().folder
    assert first != second
    assert (tmp_path / "runs" / "latest").resolve() == second


def test_the_constants_are_the_packaged_ones_with_the_plans_changes(make):
    network = make(miners=20, windows=9, window_seconds=9.0, vocab_size=1000, seed=7)
    hparams = load_hparams(network.folder / "hparams.json")
    assert hparams == network.hparams
    assert (hparams.model.vocab_size, hparams.init_seed, hparams.blocks_per_window) == (1000, 7, 18)
    assert (hparams.minimum_peers, hparams.max_topk_peers) == (20, 20)
    assert hparams.windows_per_weights == 2
    assert (network.folder / hparams.tokenizer_name / "tokenizer.json").exists()


@pytest.mark.parametrize("scheme", get_args(Scheme))
def test_each_scheme_comes_with_its_constants_and_learns_over_the_whole_run(make, scheme):
    hparams = make(scheme=scheme, windows=9).hparams
    assert hparams.outer == ("demo" if scheme == "demo" else "sparseloco")
    assert scheme != "muon" or hparams.sparseloco.inner_optimizer == "muon"
    # Miners are ahead of the last window that is judged: they must not find the peak of a new cycle there.
    ahead = hparams.peer_list_window_margin + hparams.validator_offset + 1
    if scheme == "demo":
        assert hparams.demo.learning_rate.t_max == 9 + ahead
    else:
        assert hparams.sparseloco.inner_learning_rate.t_max == (9 + ahead) * hparams.sparseloco.inner_steps


def test_windows_that_only_measure_are_no_part_of_the_schedule(make):
    hparams = make(windows=20).hparams
    assert hparams.sparseloco.inner_learning_rate.t_max == (20 + 5 - 4) * hparams.sparseloco.inner_steps


def test_a_short_run_lists_all_miners_at_once(make):
    assert make(windows=15).hparams.probation_windows == 0
    assert make(windows=16).hparams.probation_windows == 2


def test_the_shortest_window_still_leaves_time_to_train(make):
    shortest = make(window_seconds=MIN_WINDOW_SECONDS).hparams
    check_window(shortest, BLOCK_SECONDS)
    shorter = shortest.model_copy(update={"blocks_per_window": shortest.blocks_per_window - 2})
    with pytest.raises(ConfigError, match="leaves no time to train: time_window_delta_seconds 3, 2 s for the store"):
        check_window(shorter, BLOCK_SECONDS)


def test_the_key_table_is_the_owners_alone_and_names_every_bucket(make):
    network = make()
    assert network.keys.stat().st_mode & 0o777 == 0o600
    assert KeyTable(network.keys).buckets() == {"dataset", *(node.account.name for node in network.nodes)}


async def test_the_chain_knows_all_nodes_and_the_validator_may_set_weights(make):
    network = make()
    create_chain(network, seed=1)
    miner = load_hotkey(network.folder / "wallets", "miner-1", HOTKEY)
    validator = load_hotkey(network.folder / "wallets", "validator", HOTKEY)
    async with LocalChain(network.chain, validator, netuid=NETUID) as chain:
        async for block in chain.blocks():
            if block >= 2:  # registered in the first one, which counts as an update of weights
                break
        metagraph = await chain.metagraph()
        assert [metagraph.uid_of(node.address) for node in network.nodes] == [0, 1, 2, 0]  # the last: the aggregator
        by_hotkey = metagraph.by_hotkey()
        assert by_hotkey[validator.ss58_address].permit
        assert not by_hotkey[miner.ss58_address].permit
        assert (
            by_hotkey[miner.ss58_address].stake
            < network.hparams.eval_stake_limit
            < by_hotkey[validator.ss58_address].stake
        )
        await chain.set_weights({1: 0.25, 2: 0.75})
        assert await chain.weights() == {0: pytest.approx({1: 0.25, 2: 0.75}, abs=1e-4)}


@pytest.mark.parametrize("validators", range(1, MAX_VALIDATORS + 1))
def test_validators_have_different_stakes_of_which_none_decides_alone(make, validators):
    network = make(validators=validators)
    stakes = [node.stake for node in network.nodes if node.role == "validator"]
    assert stakes == sorted(set(stakes), reverse=True)
    assert len(stakes) == validators
    assert min(stakes) > max(network.hparams.eval_stake_limit, MIN_STAKE)
    assert min(stakes) > 0.05 * sum(stakes)
    if validators > 2:
        assert max(stakes) < 0.5 * sum(stakes)


async def test_every_validator_has_its_stake_and_a_permit_on_chain(make):
    network = make(validators=3)
    create_chain(network, seed=1)
    async with LocalChain(network.chain, network.nodes[0].hotkey, netuid=NETUID) as chain:
        async for block in chain.blocks():
            if block >= 1:
                break
        neurons = (await chain.metagraph()).by_hotkey()
    found = {node.name: neurons[node.address] for node in network.nodes if node.role != "aggregator"}
    assert {name: one.uid for name, one in found.items()} == {
        "validator": 0,
        "miner-1": 1,
        "miner-2": 2,
        "validator-2": 3,
        "validator-3": 4,
    }
    assert {name for name, one in found.items() if one.permit} == {"validator", "validator-2", "validator-3"}
    assert [round(found[name].stake) for name in ("validator", "validator-2", "validator-3")] == [
        200_000,
        166_667,
        133_333,
    ]


@pytest.mark.parametrize("role", get_args(Byzantine))
def test_the_node_that_lies_is_started_as_the_others_are_with_a_plot(make, role):
    network = make(validators=3, byzantine=role, window_seconds=16.0)
    (liar,) = [node for node in network.nodes if node.hostile]
    assert liar.name == {"leader": "validator", "minority-validator": "validator-2", "aggregator": "aggregator"}[role]
    command = [str(part) for part in node_command(network, liar)]
    assert command[2:6] == ["tplr.localnet.attackers.hostile_node", "42", str(network.faults), liar.role]
    honest = [str(part) for part in node_command(network, replace(liar, hostile=False))]
    assert command[6:] == honest[2:]
    assert str(network.faults) in [str(part) for part in storage_command(network, 0, Path("ready"))]
    assert json.loads(network.faults.read_text()) == []


def test_a_node_is_started_as_in_production(make):
    network = make()
    _, miner, *_ = network.nodes
    _, script, *arguments = [str(part) for part in node_command(network, miner)]
    assert Path(script).parts[-2:] == ("neurons", "miner.py")
    parsed = node_arguments(parse_arguments(["miner", *arguments]))
    assert (parsed.netuid, parsed.wallet_name, parsed.device) == (NETUID, "miner-1", "cpu")
    assert parsed.network == f"local:{network.chain}"
    assert parsed.events == network.events("miner-1")
    assert load_hparams(parsed.hparams) == network.hparams


def test_with_overlap_a_window_has_more_batches_and_the_rate_falls_over_the_same_windows(make):
    plain, overlap = (make(outer_delay=value).hparams for value in (0, 1))
    assert (plain.outer_delay, overlap.outer_delay) == (0, 1)
    assert overlap.pages_per_window == 2 * plain.pages_per_window
    one, other = plain.sparseloco, overlap.sparseloco
    assert other.inner_steps == 2 * one.inner_steps
    assert other.inner_learning_rate.t_max == 2 * one.inner_learning_rate.t_max


def test_ranks_are_those_of_the_validator_and_of_one_miner(make):
    network = make(ranks=2)
    assert [(node.name, node.ranks) for node in network.nodes] == [
        ("validator", 2),
        ("miner-1", 2),
        ("miner-2", 1),
        ("aggregator", 1),
    ]
    _, *command = [str(part) for part in node_command(network, network.nodes[1])]
    plain = [str(part) for part in node_command(network, replace(network.nodes[1], ranks=1))][1:]
    assert command[:2] == ["-m", "torch.distributed.run"]
    assert command[-len(plain) :] == plain
    assert "--nproc-per-node 2 --max-restarts 1000" in " ".join(command)


def test_without_the_scripts_folder_the_packages_own_command_starts_it(make, monkeypatch, tmp_path):
    monkeypatch.setattr(network_module.tplr, "__file__", str(tmp_path / "site-packages" / "tplr" / "__init__.py"))
    network = make()
    _, *program = [str(part) for part in node_command(network, network.nodes[0])][:4]
    assert program == ["-m", "tplr.cli", "validator"]


def test_a_nodes_environment_is_productions_and_holds_nothing_of_ours(make, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the operator's own")
    monkeypatch.setenv("R2_DATASET_BUCKET_LIST", "[]")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example")
    network = make()
    env = node_environment(network, network.nodes[1], "http://127.0.0.1:9000")
    assert not {"AWS_SECRET_ACCESS_KEY", "R2_DATASET_BUCKET_LIST", "HTTPS_PROXY"} & set(env)
    assert Environment(env).endpoint == "http://127.0.0.1:9000"
    secrets = load_bucket_secrets(env)
    assert secrets["gradients"]["name"] == network.nodes[1].account.name
    assert secrets["dataset"]["name"] == "dataset"
    assert "write" not in secrets["dataset"]["credentials"]
    assert env["HOME"] == str(network.folder / "home")
    assert env["OMP_NUM_THREADS"] == "1"


def test_what_is_not_set_is_not_passed_on():
    assert "LD_LIBRARY_PATH" not in base_environment({"PATH": "/bin"}, Path("/home"))


def test_an_operators_own_credentials_are_not_found_from_a_run(make, tmp_path, monkeypatch):
    (tmp_path / ".env").write_text("R2_DATASET_BUCKET_LIST=[]\n")
    network = make()
    monkeypatch.chdir(network.folder)
    assert find_dotenv(usecwd=True) == str(network.folder / ".env")


def test_forgetting_leaves_the_results(make):
    network = make()
    for kept in ("summary.json", "chain.sqlite"):
        (network.folder / kept).write_text(json.dumps({}))
    (network.folder / "storage").mkdir()
    forget_working_files(network.folder)
    assert {path.name for path in network.folder.iterdir()} == {
        ".env",
        "chain.sqlite",
        "faults.json",
        "hparams.json",
        "summary.json",
        "tokenizer",
    }

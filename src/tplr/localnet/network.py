"""Creates a run's folder (keys, wallets, constants, chain), and the command line and environment of each node."""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bittensor_core import Keypair

import tplr
from tplr.chain.clocks import Clock
from tplr.chain.connect import LOCAL_PREFIX
from tplr.chain.hotkeys import new_hotkey, save_hotkey
from tplr.chain.ledger import Ledger
from tplr.chain.rules import ChainLimits
from tplr.config import process_variables
from tplr.files import atomic_write
from tplr.hparams import HParams, load_hparams
from tplr.localnet.accounts import Account, bucket_variables, key_table, new_account
from tplr.localnet.dataset import SUBFOLDER, copy_tokenizer, store_shares
from tplr.localnet.plan import BLOCK_SECONDS, HOST, OVERLAP_BATCHES, Byzantine, NetworkPlan, scheme_constants

Role = Literal["miner", "validator", "aggregator"]

NETUID = 3
READY_FILE = "storage-ready.json"  # address of the storage server
HOTKEY = "default"
MINER_STAKE = 100.0
MIN_STAKE = 1000.0  # for a validator permit at an epoch
# Ordinary chain nodes keep state for 256 blocks of 12 s; this chain keeps its blocks for the same time.
RETAINED_BLOCKS = round(256 * 12 / BLOCK_SECONDS)
EPOCH_BLOCKS = 40
MAX_RESTARTS = 1000  # of torchrun's ranks, as the guide to the engine recommends

# The node that is hostile; the minority validator has the second largest stake.
BYZANTINE: dict[Byzantine, str] = {
    "leader": "validator",
    "minority-validator": "validator-2",
    "aggregator": "aggregator",
}

# Variables that a node inherits: paths and locale; no credentials, no proxies.
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR", "LANG", "LC_ALL", "TZ")


@dataclass(frozen=True)
class NodeSetup:
    """A neuron to start.

    Attributes:
        stake: of its hotkey; 0 for a node that is not registered.
        ranks: number of its processes.
        hostile: whether its writes are forged.
    """

    name: str
    role: Role
    hotkey: Keypair
    account: Account
    stake: float = 0.0
    ranks: int = 1
    hostile: bool = False

    @property
    def address(self) -> str:
        """Its hotkey's address, which identifies it on chain."""
        return self.hotkey.ss58_address


@dataclass(frozen=True)
class Network:
    """A run's folder and its nodes. The first node serves metrics on ``metrics_port``, each further one on the next."""

    folder: Path
    nodes: tuple[NodeSetup, ...]
    dataset: Account
    hparams: HParams
    seed: int
    metrics_port: int | None = None

    @property
    def aggregator(self) -> NodeSetup:
        """The node whose bucket holds included sets and aggregates."""
        return next(node for node in self.nodes if node.role == "aggregator")

    @property
    def keys(self) -> Path:
        """The storage server's key table."""
        return self.folder / "keys.json"

    @property
    def faults(self) -> Path:
        """The storage server's file of faults, which the hostile node writes."""
        return self.folder / "faults.json"

    @property
    def chain(self) -> Path:
        """The chain's file."""
        return self.folder / "chain.sqlite"

    @property
    def storage(self) -> Path:
        """The storage server's objects."""
        return self.folder / "storage"

    def events(self, name: str) -> Path:
        """A node's event file."""
        return self.folder / "events" / f"{name}.jsonl"

    def log(self, name: str) -> Path:
        """A process's log file."""
        return self.folder / "logs" / f"{name}.log"


def lay_out(plan: NetworkPlan, corpus: Path) -> Network:
    """Create the run's folder with everything but the chain. Blocks."""
    folder = plan.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    if plan.latest:
        _link(plan.latest, folder)
    copy_tokenizer(corpus, folder / "tokenizer")
    hparams = write_hparams(plan, folder / "hparams.json", corpus)
    stakes = validator_stakes(plan.validators, hparams.eval_stake_limit)
    validator, *others = (
        _new_node("validator" if rank == 1 else f"validator-{rank}", "validator", stake, plan.ranks if rank == 1 else 1)
        for rank, stake in enumerate(stakes, 1)
    )
    miners = [
        _new_node(f"miner-{number}", "miner", MINER_STAKE, plan.ranks if number == 1 else 1)
        for number in range(1, plan.miners + 1)
    ]
    # The aggregator only reads the chain, so it can use the validator's hotkey.
    aggregator = NodeSetup("aggregator", "aggregator", validator.hotkey, new_account("aggregator"))
    nodes = (validator, *miners, *others, aggregator)  # validator is uid 0, so that miner-1 has uid 1
    lies = plan.byzantine and BYZANTINE[plan.byzantine]
    network = Network(
        folder=folder,
        nodes=tuple(replace(node, hostile=node.name == lies) for node in nodes),
        dataset=new_account("dataset"),
        hparams=hparams,
        seed=plan.seed,
        metrics_port=plan.metrics_port,
    )
    network.faults.write_text("[]")
    if plan.metrics_port is not None:
        (folder / "prometheus.yml").write_text(prometheus_config(network))
    # A node searches for .env from its working directory upwards; this file ends the search before the operator's own.
    (folder / ".env").write_text("# Nodes of a localnet get their environment from localnet; this file stays empty.\n")
    (folder / "home").mkdir()
    for node in network.nodes:
        save_hotkey(folder / "wallets", node.name, HOTKEY, node.hotkey)
    network.keys.touch(mode=0o600)
    network.keys.write_text(json.dumps(key_table([network.dataset, *(node.account for node in network.nodes)])))
    return network


def validator_stakes(validators: int, most_of_a_miner: float) -> list[float]:
    """Return stakes in the ratio ``2N : 2N - 1 : ... : N + 1``, for three 40, 33 and 27 %; all exceed a miner's."""
    return [10 * most_of_a_miner * (2 * validators - rank) / (2 * validators) for rank in range(validators)]


def prometheus_config(network: Network) -> str:
    """Return a Prometheus configuration that scrapes all nodes, as JSON, which is valid YAML."""
    jobs = [
        {"targets": [f"{HOST}:{port}"], "labels": {"node": node.name}}
        for node, port in zip(network.nodes, itertools.count(network.metrics_port or 0))
    ]
    scrape = {"job_name": "tplr", "static_configs": jobs}
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    return json.dumps({"global": every, "scrape_configs": [scrape]}, indent=2)


def windows_in_all(scored: int, margin: int, offset: int) -> int:
    """Return the number of windows until ``scored`` windows are scored.

    A run starts ``margin`` windows late, and a validator scores ``offset`` windows behind.
    """
    return scored + margin + offset + 1


def write_hparams(plan: NetworkPlan, path: Path, corpus: Path) -> HParams:
    """Write the packaged profile with the plan's changes to ``path``, and read it back."""
    raw = scheme_constants(plan.scheme, small=plan.small)
    raw["outer_delay"] = plan.outer_delay
    if plan.outer_delay:
        raw["pages_per_window"] *= OVERLAP_BATCHES
        raw["sparseloco"]["inner_steps"] *= OVERLAP_BATCHES
    # The learning rate falls within the run, and its cycle does not restart before the last windows are scored.
    if not plan.with_probation:
        raw["probation_windows"] = 0
    windows = windows_in_all(plan.windows, raw["peer_list_window_margin"], raw["validator_offset"])
    if raw["probation_windows"]:
        windows -= raw["probation_windows"] + raw["validator_offset"]  # the first windows only measure, without a step
    if raw["outer"] == "demo":
        raw["demo"]["learning_rate"]["t_max"] = windows
    else:
        group = raw["sparseloco"]
        group["inner_learning_rate"]["t_max"] = windows * group["inner_steps"]
    raw["model"]["vocab_size"] = plan.vocab_size
    if plan.data == "store":
        raw |= {"data": "store", "store": store_shares(corpus, plan, raw["sequence_length"], raw["batch_size"])}
    raw |= {
        "tokenizer_name": "tokenizer",  # the folder beside the file
        "init_seed": plan.seed,
        "blocks_per_window": plan.blocks_per_window,
        "minimum_peers": plan.miners,
        "max_topk_peers": max(raw["max_topk_peers"], plan.miners),
        # Short enough that short runs set weights, too.
        "windows_per_weights": min(raw["windows_per_weights"], max(1, plan.windows // 4)),
    }
    atomic_write(path, json.dumps(raw, indent=2).encode())
    return load_hparams(path)


def create_chain(network: Network, seed: int, *, clock: Clock | None = None) -> None:
    """Create the chain with all nodes registered; its blocks follow ``clock`` from now on. Blocks."""
    limits = ChainLimits(
        tempo=EPOCH_BLOCKS,
        min_stake=MIN_STAKE,
        weights_rate_limit=1,
        min_allowed_weights=1,
        commit_reveal=False,
    )
    Ledger.create(
        network.chain,
        netuid=NETUID,
        block_time=BLOCK_SECONDS,
        limits=limits,
        seed=seed,
        retained_blocks=RETAINED_BLOCKS,
        clock=clock,
    )
    administrator = Ledger(network.chain, clock=clock)
    try:
        for node in network.nodes:
            if node.role == "aggregator":
                continue
            # Without this, validators would get their permits by stake only at the next epoch.
            administrator.register(node.address, f"cold-{node.name}", stake=node.stake, permit=node.role == "validator")
    finally:
        administrator.close()


def storage_command(network: Network, port: int, ready_file: Path) -> list[str | Path]:
    """Return the storage server's command line."""
    command: list[str | Path] = [sys.executable, "-m", "tplr.testing.s3server", "--root", network.storage]
    files = ("--keys", network.keys, "--faults", network.faults, "--ready-file", ready_file)
    return [*command, *files, "--requests", network.folder / "logs" / "requests.jsonl", "--port", str(port)]


def node_command(network: Network, node: NodeSetup) -> list[str | Path]:
    """Return a neuron's command line: production's, except for endpoint and network."""
    script = Path(tplr.__file__).parents[2] / "neurons" / f"{node.role}.py"
    # An installed package lacks the folder ``neurons``.
    program = [script] if script.is_file() else ["-m", "tplr.cli", node.role]
    if node.hostile:
        program = ["-m", "tplr.localnet.attackers.hostile_node", str(network.seed), network.faults, node.role]
    return [
        sys.executable,
        *(_torchrun(node.ranks) if node.ranks > 1 else ()),
        *program,
        *("--netuid", str(NETUID)),
        *("--wallet.name", node.name, "--wallet.hotkey", HOTKEY, "--wallet.path", network.folder / "wallets"),
        *("--subtensor.network", f"{LOCAL_PREFIX}{network.chain}"),
        *("--device", "cpu"),
        *("--hparams", network.folder / "hparams.json"),
        *("--state", network.folder / "state"),
        *("--events", network.events(node.name)),
        *_metrics(network, node),
    ]


def _metrics(network: Network, node: NodeSetup) -> tuple[str, ...]:
    if network.metrics_port is None:
        return ()
    return ("--metrics-port", str(network.metrics_port + network.nodes.index(node)))


def _torchrun(ranks: int) -> tuple[str, ...]:
    options = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(MAX_RESTARTS))
    return ("-m", "torch.distributed.run", *options)


def node_environment(network: Network, node: NodeSetup, endpoint: str) -> dict[str, str]:
    """Return a neuron's complete environment: production's variables, and one thread, as nodes share the machine."""
    shared = {
        **base_environment(process_variables(), network.folder / "home"),
        "TPLR_S3_ENDPOINT": endpoint,
    }
    if node.role == "aggregator":
        return {**shared, **bucket_variables("aggregator", node.account, "read", "write")}
    return {
        **shared,
        **bucket_variables("aggregator", network.aggregator.account, "read"),
        **bucket_variables("gradients", node.account, "read", "write"),
        **bucket_variables("dataset", network.dataset, "read"),
        "TPLR_DATASET_SUBFOLDER": SUBFOLDER,
    }


def base_environment(inherited: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the environment of every localnet process: the variables in ``INHERITED``, and a separate home folder."""
    return {
        **{name: inherited[name] for name in INHERITED if name in inherited},
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def forget_working_files(folder: Path) -> None:
    """Delete a finished run's buckets, states, wallets and keys. Blocks."""
    for name in ("storage", "state", "wallets", "home"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "keys.json").unlink(missing_ok=True)


def _link(link: Path, folder: Path) -> None:
    """Point ``link`` at ``folder`` atomically."""
    link.parent.mkdir(parents=True, exist_ok=True)
    draft = link.with_name(f"{link.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)
    draft.symlink_to(folder.name)
    draft.replace(link)


def _new_node(name: str, role: Role, stake: float, ranks: int) -> NodeSetup:
    return NodeSetup(name, role, new_hotkey(), new_account(), stake, ranks)

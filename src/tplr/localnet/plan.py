"""The arguments of ``tplr localnet``, checked together, as one frozen plan."""

import argparse
import json
import math
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from tplr.errors import ConfigError
from tplr.home_paths import home_path
from tplr.hparams import HParams, load_hparams

Keep = Literal["all", "results"]
Scheme = Literal["muon", "sparseloco", "demo"]  # the first is the default: its constants are the profile's
DataKind = Literal["pages", "store"]
Byzantine = Literal["leader", "minority-validator", "aggregator"]

HOST = "127.0.0.1"
PROFILE = Path(__file__).with_name("hparams.json")
DEFAULT_SCHEME: Scheme = "muon"
BLOCK_SECONDS = 0.5
MIN_WINDOW_SECONDS = 7.5  # leaves a second to train after the whole wait for a missing update
MAX_NEURONS = 256  # uids of a subnet
MAX_VALIDATORS = 8  # so that each is an elector: the smallest has more than a twentieth of the stake
MAX_RANKS = 8  # of one node
# A shorter run would hardly learn: with probation its first six windows only measure.
WINDOWS_FOR_PROBATION = 16
MIN_BYZANTINE_WINDOW_SECONDS = 16.0  # a silent proposer costs a slot of six ``relay_seconds``
MIN_SMALL_WINDOW_SECONDS = 40.0  # for the longer waits of dozens of nodes
MIN_VALIDATORS_OF_WHICH_ONE_LIES = 3  # with fewer there is no honest majority
MIN_CHAOS_WINDOWS = 20  # FIRST_WINDOW, QUIET_WINDOWS, and some between them
OVERLAP_BATCHES = 2
MIN_VOCAB_SIZE = 257  # all bytes, and the end-of-text token

RUN_BYTES = 100 * 2**20  # corpus, tokenizer, chain, logs, picture
# A node's saved state: two snapshots, and one being written, of model, error feedback and at most two moments.
COPIES_OF_MODEL = 12


@dataclass(frozen=True, kw_only=True)
class NetworkPlan:
    """A checked request for a localnet.

    Attributes:
        data: train on pages of texts, or on sequences of a token store.
        chaos: inject the faults of ``chaos.py``.
        scheme: scheme of the updates; each scheme's constants are in this folder.
        windows: number of windows to train, from the run's start window.
        corpus: folder of text to train on; None for the built-in one.
        run_dir: absolute path of the folder for all files of the run.
        latest: symbolic link to set to ``run_dir``, or None.
        cache: folder where prepared corpora are kept between runs.
        port: of the storage server; 0: a free one.
        byzantine: the role of the hostile node (``attackers/hostile_node.py``), or None.
        metrics_port: port of the first node's metrics; each further node has the next port. None: no metrics.
        validators: number of validators. Their stakes fall by rank; with three or more, none has half of the stake.
        ranks: number of ``torchrun`` processes of the first validator and of miner-1. The other nodes have one process
            each, which tests that both kinds agree.
        outer_delay: as in the constants. With 1, a window has ``OVERLAP_BATCHES`` times the batches.
        small: a smaller model, fewer steps and longer waits, for dozens of nodes on a few cores.
        share_imports: fork the nodes from one process, so that they share the memory of its imported modules.
        keep: ``results`` deletes buckets, states and wallets after a run that passed.
    """

    miners: int
    windows: int
    window_seconds: float
    corpus: Path | None
    run_dir: Path
    latest: Path | None
    cache: Path
    port: int
    metrics_port: int | None
    vocab_size: int
    seed: int
    keep: Keep
    scheme: Scheme
    chaos: bool
    data: DataKind
    ranks: int
    outer_delay: int
    validators: int
    byzantine: Byzantine | None
    small: bool
    share_imports: bool

    @property
    def with_probation(self) -> bool:
        """Whether miners earn their places by probation; otherwise all are listed at once.

        With ``chaos`` and several validators there is no probation: faults end a validator in most windows, so for a
        long time more than half of them measure nobody.
        """
        return self.windows >= WINDOWS_FOR_PROBATION and not (self.chaos and self.validators > 1)

    @property
    def blocks_per_window(self) -> int:
        """Window length in blocks of ``BLOCK_SECONDS``."""
        return round(self.window_seconds / BLOCK_SECONDS)

    @property
    def metrics_ports(self) -> range:
        """The metrics ports, one for each node; the aggregator has the last."""
        return (
            range(0)
            if self.metrics_port is None
            else range(self.metrics_port, self.metrics_port + self.validators + self.miners + 1)
        )


def scheme_constants(scheme: Scheme = DEFAULT_SCHEME, *, small: bool = False) -> dict[str, Any]:
    """Return the profile's constants merged with those of a scheme, and of a ``small`` run, as JSON values."""
    raw: dict[str, Any] = json.loads(PROFILE.read_text())
    if scheme != DEFAULT_SCHEME:
        del raw[raw["outer"]]
        raw |= json.loads(PROFILE.with_name(f"{scheme}.json").read_text())
    if small:
        changes = json.loads(PROFILE.with_name("small.json").read_text())
        raw["model"] |= changes.pop("model")
        if "sparseloco" in raw:
            raw["sparseloco"] |= changes["sparseloco"]
        del changes["sparseloco"]
        raw |= changes
    raw.pop("_", None)
    return raw


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``tplr localnet``; their names are those of ``make_plan``."""
    profile = load_hparams(PROFILE)
    add = parser.add_argument
    add("--scheme", choices=get_args(Scheme), default=DEFAULT_SCHEME, help="update scheme (default: %(default)s)")
    add(
        "--data",
        choices=get_args(DataKind),
        default=profile.data,
        help="train on pages of texts, or on a token store (default: pages)",
    )
    add("--miners", type=int, default=3, metavar="N", help="number of miners (default: %(default)s)")
    add("--validators", type=int, default=1, metavar="N", help="with different stakes (default: %(default)s)")
    add("--ranks", type=int, default=1, metavar="N", help="processes of miner-1 and of validator, over torchrun")
    add("--windows", type=int, default=20, metavar="N", help="windows to train (default: %(default)s)")
    add(
        "--window-seconds",
        type=float,
        default=profile.blocks_per_window * BLOCK_SECONDS,
        metavar="S",
        help=f"length of a window, in steps of {BLOCK_SECONDS} (default: %(default)s)",
    )
    add(
        "--outer-delay", type=int, choices=(0, 1), default=profile.outer_delay, help="1: miners train while they gather"
    )
    add(
        "--corpus",
        type=home_path,
        metavar="FOLDER",
        help="folder of text to train on (default: Python's standard library)",
    )
    add("--run-dir", type=home_path, metavar="DIR", help="new or empty folder for this run (default: runs/<time>)")
    add("--port", type=int, default=0, metavar="P", help="port of the storage server (default: a free one)")
    add("--vocab-size", type=int, default=profile.model.vocab_size, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=profile.init_seed, metavar="N", help="of the first weights (default: %(default)s)")
    add(
        "--metrics-port",
        type=int,
        metavar="P",
        help="nodes serve metrics on this port and the next ones; the run folder gets a prometheus.yml",
    )
    add("--small", action="store_true", help="a smaller model and less training: for dozens of nodes on a few cores")
    add("--share-imports", action="store_true", help="fork nodes from one process: less memory for each (Linux)")
    add("--chaos", action="store_true", help="inject faults: kills, pauses, outages, garbage, clock skew")
    add("--byzantine", choices=get_args(Byzantine), help="one node sends false documents (--validators 3)")
    add(
        "--keep",
        choices=("all", "results"),
        default="all",
        help="'results' deletes buckets, states and wallets after a run that passed (default: %(default)s)",
    )


def make_plan(
    *,
    cache: Path = Path(".cache/tplr/localnet"),
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    **given: Any,
) -> NetworkPlan:
    """Check the arguments together and against this machine. Creates nothing.

    Args:
        free_bytes: free space on a folder's disk, in bytes; replaced in tests.
        given: arguments that ``add_arguments`` declares; the others have their defaults.

    Raises:
        ConfigError: lists every problem, each with the argument and the remedy.
    """
    profile, parser = load_hparams(PROFILE), argparse.ArgumentParser()
    add_arguments(parser)
    options = vars(parser.parse_args([])) | given
    corpus, run_dir = options["corpus"], options["run_dir"]
    options["corpus"] = corpus.absolute() if corpus else None
    options["run_dir"] = (run_dir or default_run_dir()).absolute()
    latest = None if run_dir else Path("runs/latest").absolute()
    plan = NetworkPlan(**options, latest=latest, cache=cache.absolute())
    problems = _check_sizes(plan, profile)
    if corpus is not None and not corpus.is_dir():
        problems.append(f"--corpus {corpus}: no such folder; give a folder of text, or leave the option out")
    folder_problems = _check_folder(plan.run_dir, "--run-dir") + _check_folder(plan.cache, "cache", may_hold=True)
    problems += folder_problems
    if not problems:  # else the estimate, or the disk, is unknown
        problems += _check_disk(plan, profile, free_bytes)
    problems += _check_port("--port", plan.port)
    for port in plan.metrics_ports:
        problems += (
            _check_port("--metrics-port", port)
            if port
            else [f"--metrics-port {plan.metrics_port}: expected 1 to 65535"]
        )
    if find_spec("matplotlib") is None:
        problems.append("matplotlib, which draws loss.png, is not installed: .venv/bin/pip install -e '.[localnet]'")
    if problems:
        raise ConfigError(problems)
    return plan


def claim_run_dir(plan: NetworkPlan) -> NetworkPlan:
    """Create the run's folder, and return the plan with it. Blocks. Raises OSError.

    If another run has taken the default folder since the plan was made, take the next one.
    """
    while True:
        try:
            plan.run_dir.mkdir(parents=True, exist_ok=plan.latest is None)
        except FileExistsError:
            if plan.latest is None:
                raise
            plan = replace(plan, run_dir=default_run_dir().absolute())
        else:
            return plan


def default_run_dir() -> Path:
    """Return ``runs/<UTC time>``, with a number appended if that folder exists."""
    base = Path("runs", time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime()))
    found, number = base, 2
    while found.exists():
        found, number = base.with_name(f"{base.name}-{number}"), number + 1
    return found


def needed_bytes(plan: NetworkPlan, profile: HParams) -> int:
    """Return an upper estimate of the bytes that a run leaves on disk."""
    model = profile.model
    per_layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size
    parameters = 2 * plan.vocab_size * model.hidden_size + model.num_hidden_layers * per_layer
    states = (plan.miners + plan.validators) * COPIES_OF_MODEL * parameters * 4
    # An update takes far less than a bit per parameter; reports and logs are small in comparison.
    updates = plan.miners * plan.windows * parameters // 8
    return RUN_BYTES + states + updates


def fewest_windows(plan: NetworkPlan, profile: HParams) -> int:
    """Return the number of windows after which each miner is listed, applied twice and tested once."""
    tested = max(2, math.ceil(plan.miners / profile.uids_per_window))
    if not plan.with_probation:
        return tested
    return profile.probation_windows + profile.validator_offset + profile.peer_list_window_margin + tested


def _check_sizes(plan: NetworkPlan, profile: HParams) -> list[str]:
    problems = []
    if not 1 <= plan.validators <= MAX_VALIDATORS:
        problems.append(f"--validators {plan.validators}: expected 1 to {MAX_VALIDATORS}")
    most = MAX_NEURONS - min(max(plan.validators, 1), MAX_VALIDATORS)
    if not 1 <= plan.miners <= most:
        problems.append(f"--miners {plan.miners}: expected 1 to {most}")
    fewest = fewest_windows(plan, profile)
    if plan.windows < fewest:
        problems.append(
            f"--windows {plan.windows}: expected at least {fewest}, in which each miner is tested "
            f"({profile.uids_per_window} in a window)"
        )
    if plan.chaos and plan.windows < MIN_CHAOS_WINDOWS:
        problems.append(f"--windows {plan.windows}: expected at least {MIN_CHAOS_WINDOWS} with --chaos")
    if not 1 <= plan.ranks <= MAX_RANKS:
        problems.append(f"--ranks {plan.ranks}: expected 1 to {MAX_RANKS}")
    if plan.outer_delay and plan.scheme == "demo":
        problems.append(f"--outer-delay {plan.outer_delay}: expected 0 with --scheme demo")
    if plan.chaos and plan.ranks > 1:  # a signal to torchrun does not suspend its ranks
        problems.append(f"--ranks {plan.ranks}: expected 1 with --chaos")
    in_blocks = plan.window_seconds / BLOCK_SECONDS
    if not (math.isfinite(in_blocks) and plan.window_seconds >= MIN_WINDOW_SECONDS and in_blocks == round(in_blocks)):
        problems.append(
            f"--window-seconds {plan.window_seconds:g}: expected at least {MIN_WINDOW_SECONDS:g}, "
            f"in steps of {BLOCK_SECONDS:g}"
        )
    problems += _check_byzantine(plan) if plan.byzantine else []
    if plan.small and plan.window_seconds < MIN_SMALL_WINDOW_SECONDS:
        problems.append(
            f"--window-seconds {plan.window_seconds:g}: expected at least {MIN_SMALL_WINDOW_SECONDS:g} with --small"
        )
    if plan.share_imports and sys.platform != "linux":
        problems.append("--share-imports: expected on Linux")
    if plan.vocab_size < MIN_VOCAB_SIZE:
        problems.append(f"--vocab-size {plan.vocab_size}: expected at least {MIN_VOCAB_SIZE}")
    if not 0 <= plan.seed < 2**63:
        problems.append(f"--seed {plan.seed}: expected 0 to 2^63 - 1")
    return problems


def _check_byzantine(plan: NetworkPlan) -> list[str]:
    problems = []
    if plan.validators < MIN_VALIDATORS_OF_WHICH_ONE_LIES:
        problems.append(
            f"--validators {plan.validators}: expected at least {MIN_VALIDATORS_OF_WHICH_ONE_LIES} with --byzantine"
        )
    if plan.window_seconds < MIN_BYZANTINE_WINDOW_SECONDS:
        problems.append(
            f"--window-seconds {plan.window_seconds:g}: expected at least {MIN_BYZANTINE_WINDOW_SECONDS:g} "
            "with --byzantine"
        )
    if plan.chaos:
        problems.append("--byzantine: expected without --chaos, which excuses a stall")
    if plan.ranks > 1:
        problems.append(f"--ranks {plan.ranks}: expected 1 with --byzantine")
    return problems


def _check_folder(folder: Path, name: str, *, may_hold: bool = False) -> list[str]:
    parent = _existing(folder)
    if not parent.is_dir():
        return [f"{name} {folder}: {parent} is a file; give another folder"]
    try:
        tempfile.TemporaryDirectory(dir=parent, prefix=".tplr-").cleanup()
    except OSError as error:
        return [f"{name} {folder}: can't write to {parent}: {error.strerror}; give another folder"]
    if not may_hold and folder.is_dir() and any(folder.iterdir()):
        return [f"{name} {folder}: is not empty; give a new folder, or leave the option out"]
    return []


def _check_disk(plan: NetworkPlan, profile: HParams, free_bytes: Callable[[Path], int]) -> list[str]:
    needed, free = needed_bytes(plan, profile), free_bytes(_existing(plan.run_dir))
    if free >= needed:
        return []
    return [
        f"disk of {plan.run_dir}: {free / 2**20:.0f} MiB free, about {needed / 2**20:.0f} MiB needed; "
        "free some, or give a --run-dir on another disk, fewer --miners or a smaller --vocab-size"
    ]


def _check_port(option: str, port: int) -> list[str]:
    if port == 0:
        return []
    if not 0 < port < 65536:
        return [f"{option} {port}: expected 1 to 65535, or 0 for a free one"]
    with socket.socket() as probe:
        # Like a server, so that a port that has only closing connections counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return [f"{option} {port}: {error.strerror} on {HOST}; give another port, or 0 for a free one"]
    return []


def _existing(path: Path) -> Path:
    """Return ``path``, or its nearest existing parent folder."""
    return next(folder for folder in (path, *path.parents) if folder.exists())

"""A node under ``torchrun``: rank 0 is the node; the other ranks hold their shards and execute its commands."""

import ctypes
import datetime
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tplr.config import Environment
from tplr.errors import ConfigError
from tplr.hparams import load_hparams
from tplr.logging import logger, name_node
from tplr.node.arguments import Arguments
from tplr.node.checks import Checks, check_device
from tplr.node.train_state import TrainState
from tplr.training.commands import Commands
from tplr.training.model import build_model
from tplr.training.sharded import joined_process_group

PR_SET_PDEATHSIG = 1  # linux/prctl.h
CHECKS_SECONDS = 60.0  # approximate duration of rank 0's start-up checks


def with_rank_device(args: Arguments, environment: Environment) -> Arguments:
    """Return ``args`` with ``--device cuda`` replaced by this rank's GPU of its machine."""
    local_rank = environment.local_rank
    return replace(args, device=f"cuda:{local_rank}") if local_rank and args.device == "cuda" else args


@contextmanager
def joined_ranks(args: Arguments, environment: Environment, checks: Checks) -> Iterator[Commands | None]:
    """Join the process group that ``torchrun`` started; yields None if this is the only process.

    If rank 0 can't use its device, it adds that to ``checks`` and joins nothing: the start-up checks report it together
    with all other problems.

    Raises:
        ConfigError: the variables of ``torchrun`` are wrong, the role does not support ranks, or another rank than 0
            can't use its device.
    """
    size = environment.world_size
    if size == 1:
        yield None
        return
    if args.role == "aggregator":
        raise ConfigError(f"WORLD_SIZE is {size}: an aggregator is one process; start it without torchrun")
    if environment.max_restarts:
        _end_with_torchrun()
    rank, local_size = environment.rank, environment.local_world_size
    device = checks.take("device", check_device, args.device, local_size)
    if device is None:
        if rank == 0:
            yield None
            return
        time.sleep(CHECKS_SECONDS)  # torchrun ends all ranks when the first one ends: rank 0 reports its problems first
        raise ConfigError([problem.text for problem in checks.problems])
    timeout = datetime.timedelta(seconds=args.rank_timeout)
    restart = environment.restart_count
    with joined_process_group(device, timeout, restart=restart) as parallel:
        commands = Commands(parallel, timeout)
        if parallel.rank == 0 and environment.max_restarts == "0" and not environment.launched:
            logger.warning("torchrun does not restart a failed rank: give it --max-restarts, for example 1000")
        try:
            yield commands
        finally:
            if parallel.rank == 0:
                commands.end()


def _end_with_torchrun() -> None:
    """Make Linux kill this process when ``torchrun`` ends, because ``torchrun`` starts each rank in its own session.

    Otherwise, after a restart of ``torchrun``, the old ranks would be a second node with the same hotkey.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve_rank_0(args: Arguments, commands: Commands) -> None:
    """Execute rank 0's commands until it ends.

    Raises:
        ConfigError: hparams can't be read, or the device can't be used. It is raised only after rank 0 has reported all
            its problems, because torchrun ends all ranks when the first one ends.
    """
    name_node(f"{args.role}, rank {commands.parallel.rank}")
    for number in (signal.SIGINT, signal.SIGTERM):  # torchrun sends them to all ranks; rank 0 decides when to end
        signal.signal(number, signal.SIG_IGN)
    try:
        hparams = load_hparams(args.hparams)
        device = check_device(args.device)
    except ConfigError:
        commands.hear(CHECKS_SECONDS)
        raise
    settings = args.device_settings
    model = build_model(hparams, device, commands.parallel, settings, first_weights=False)
    commands.serve(TrainState(model, hparams, args.state_folder, settings, commands))

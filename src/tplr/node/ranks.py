"""A miner under ``torchrun``: rank 0 is the node; the other ranks only train."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tplr.config import Environment
from tplr.hparams import HParams, load_hparams
from tplr.logging import logger, name_node
from tplr.node.arguments import Arguments
from tplr.node.checks import check_device
from tplr.node.train_state import TrainState
from tplr.training.sharded import ProcessGroupContext, ShardedTraining, joined_process_group, serve


def with_rank_device(args: Arguments, environment: Environment) -> Arguments:
    """``args`` with ``--device cuda`` replaced by this rank's GPU of its machine."""
    local_rank = environment.local_rank
    return replace(args, device=f"cuda:{local_rank}") if local_rank and args.device == "cuda" else args


@contextmanager
def process_group(args: Arguments, environment: Environment) -> Iterator[ProcessGroupContext | None]:
    """Joins the process group that ``torchrun`` started; None if there is only this process.

    Raises:
        ConfigError: ``--device`` is not a device of this machine.
    """
    if args.role != "miner" or environment.world_size == 1:
        yield None
        return
    with joined_process_group(check_device(args.device)) as group:
        yield group


def serve_rank_0(args: Arguments, group: ProcessGroupContext) -> None:
    """Train as rank 0 orders, until it ends. Raises ConfigError if hparams can't be read."""
    name_node(f"{args.role}, rank {group.rank}")
    serve(group, load_hparams(args.hparams))


def shard_training(train_state: TrainState, hparams: HParams, group: ProcessGroupContext) -> None:
    """Distribute rank 0's local training over all ranks."""
    logger.info("local training is distributed over %d ranks", group.size)
    train_state.local = ShardedTraining(train_state.local, hparams, group)

"""A miner under ``torchrun``: rank 0 is the node, the other ranks train for it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tplr.hparams import HParams, load_hparams
from tplr.logging import logger, name_node
from tplr.node.arguments import Arguments
from tplr.node.startup import check_device
from tplr.node.train_state import TrainState
from tplr.training.sharded import ProcessGroupContext, ShardedTraining, joined_process_group, serve


def of_this_rank(args: Arguments) -> Arguments:
    """With ``--device cuda`` as this rank's own GPU of its machine."""
    local_rank = os.environ.get("LOCAL_RANK")
    return replace(args, device=f"cuda:{local_rank}") if local_rank and args.device == "cuda" else args


@contextmanager
def ranks_of(args: Arguments) -> Iterator[ProcessGroupContext | None]:
    """The ranks that ``torchrun`` started, joined; None if it started none, or just one.

    Raises:
        ConfigError: ``--device`` is no device of this machine.
    """
    if args.role != "miner" or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    with joined_process_group(check_device(args.device)) as ranks:
        yield ranks


def help_rank_0(args: Arguments, ranks: ProcessGroupContext) -> None:
    """What every other rank does, until rank 0 ends. Raises ConfigError if hparams can't be read."""
    name_node(f"{args.role}, rank {ranks.rank}")
    serve(ranks, load_hparams(args.hparams))


def share_training(train_state: TrainState, hparams: HParams, ranks: ProcessGroupContext) -> None:
    """Let rank 0's local training be done by all ranks."""
    logger.info("%d ranks train together", ranks.size)
    train_state.local = ShardedTraining(train_state.local, hparams, ranks)

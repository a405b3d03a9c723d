"""Opens a run by its description, for readers that do not take part in it and have no configuration."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tplr.config import Environment
from tplr.join.description import load_description
from tplr.node.arguments import Arguments


def reader_arguments(args: Arguments, path: Path) -> Arguments:
    """Return ``args`` for the network of the run that this file describes. Raises as ``load_description``."""
    run = load_description(path)
    return replace(args, netuid=run.netuid, network=run.network, hparams=path.parent / run.hparams.file)


@asynccontextmanager
async def described(path: Path) -> AsyncIterator[Environment]:
    """Yield this process's environment with the run's buckets from its description."""
    from tplr.node.network_reader import this_environment

    async with this_environment() as here:
        yield Environment({**here.variables, **load_description(path).variables()})

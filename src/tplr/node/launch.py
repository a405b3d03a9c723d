"""Runs a node as several processes, one for each GPU, and ends with the node's own exit status."""

import sys
import uuid
from collections.abc import Sequence

from tplr.config import LAUNCHED
from tplr.node.checks import MISCONFIGURED, OUTDATED, OUTSIDE_DOWN

# Arguments of the interpreter. Without -P it would import modules from the working directory, a node's folder, where
# strangers' files may be.
PROGRAM = ("-P", "-m", "tplr.cli")
MAX_RESTARTS = 1  # one crash is restarted at once; then the service manager decides
OK, CRASHED = 0, 1


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run ``tplr ARGUMENTS`` in ``ranks`` processes until they end; after a crash, once more.

    ``torchrun`` itself always exits with 1 if a rank fails, so a service manager could not distinguish a wrong
    configuration from a crash, and it restarts both.

    Returns:
        Exit status: 0 after a signal, else that of the first rank that ended by itself.
    """
    status = OK
    for _ in range(1 + MAX_RESTARTS):
        status = run_once(ranks, arguments)
        if status in (OK, MISCONFIGURED, OUTSIDE_DOWN, OUTDATED):
            break
    return status


def run_once(ranks: int, arguments: Sequence[str]) -> int:
    """As ``launch``, without a restart."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"{LAUNCHED}{uuid.uuid4()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)(*PROGRAM, *arguments)
    except ChildFailedError as error:
        codes = [failure.exitcode for _, failure in sorted(error.failures.items())]
        return next((code for code in codes if code > 0), CRASHED)  # negative: ended by a signal
    except SignalException:
        return OK
    return OK

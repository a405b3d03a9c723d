"""Read the history of a finished localnet into pandas: windows, updates, contributors.

    python examples/history_pandas.py [RUN]

RUN is a folder of ``tplr localnet`` (default: runs/latest). All data come from the public buckets and the chain, as for
a run on a network.
"""

import argparse
import asyncio
from pathlib import Path

import pandas as pd

from tplr.localnet.reopen import open_finished
from tplr.node.replay import reported_windows
from tplr.run.history import RunHistory, read_history
from tplr.training.schemes import payload_spec


async def history(run: Path) -> RunHistory:
    """Read the published history of the run's windows."""
    async with open_finished(run) as network:
        windows = await reported_windows(network)
        first, last = await network.start_window(), windows[-1]
        return await read_history(network, payload_spec(network.hparams), range(first, last + 1))


def frames(found: RunHistory) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return tables of windows, included updates, and contributors."""
    windows = pd.DataFrame(
        {"window": one.window, "held_out_loss": one.held_out_loss, "updates": len(one.batches)} for one in found.windows
    ).set_index("window")
    updates = pd.DataFrame(
        {"window": one.window, "uid": int(uid), "batches": batches}
        for one in found.windows
        for uid, batches in one.batches.items()
    )
    contributors = pd.DataFrame(one.model_dump() for one in found.contributors).set_index("uid")
    return windows, updates, contributors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path("runs/latest"))
    windows, updates, contributors = frames(asyncio.run(history(parser.parse_args().run)))
    print(windows, updates.pivot_table(index="window", columns="uid", values="batches"), contributors, sep="\n\n")


if __name__ == "__main__":
    main()

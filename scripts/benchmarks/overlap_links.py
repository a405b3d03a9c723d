"""Measures the share of a window in which miners train, with ``outer_delay`` 0 and 1, in a localnet with slow links.

Each miner reaches the storage server through its own relay (``slow_link.py``) with 20 Mbit/s in each direction. Updates
have the largest possible size: every entry, in float32.

    python scripts/benchmarks/overlap_links.py     # 6 minutes on 2 free cores

Writes ``docs/benchmarks/overlap_links.csv``: for each value and miner, seconds of a window by phase, without the first
``WARM_UP`` windows, and prints the share of training.
"""

import argparse
import asyncio
import csv
import statistics
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from pictures import redraw

from tplr.localnet.network import NodeSetup
from tplr.localnet.plan import NetworkPlan, make_plan
from tplr.localnet.process import Child
from tplr.localnet.supervisor import Localnet
from tplr.node.window_time import PHASES
from tplr.telemetry import read_events

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "docs" / "benchmarks" / "overlap_links.csv"
MBIT = 20
WARM_UP = 1
# More batches than fit into a window, and every entry of an update.
CONSTANTS = {
    "pages_per_window": 12,
    "topk_compression": 64 * 64,
    "quantization_bits": 0,
    "time_window_delta_seconds": 4.0,
    "peer_list_window_margin": 1,
}


class SlowNet(Localnet):
    """A localnet with changed constants and with miners' links limited to ``MBIT``."""

    def __init__(self, plan: NetworkPlan) -> None:
        super().__init__(plan)
        self.links: list[subprocess.Popen[str]] = []

    async def _start_storage(self, stack: AsyncExitStack) -> str:
        network = self.network
        sparseloco = network.hparams.sparseloco
        assert sparseloco is not None
        changes = CONSTANTS | {"sparseloco": sparseloco.model_copy(update={"inner_steps": 200})}
        self.network = replace(network, hparams=network.hparams.model_copy(update=changes))
        (network.folder / "hparams.json").write_text(self.network.hparams.model_dump_json(exclude={"demo"}))
        return await super()._start_storage(stack)

    def _node(self, node: NodeSetup, endpoint: str) -> Child:
        if node.role == "miner":
            link = subprocess.Popen(
                [sys.executable, HERE / "slow_link.py", endpoint, "--mbit", str(MBIT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert link.stdout is not None
            endpoint = f"http://127.0.0.1:{link.stdout.readline().strip()}"
            self.links.append(link)
        return super()._node(node, endpoint)


async def measure(outer_delay: int, windows: int, run_dir: Path) -> list[dict[str, object]]:
    """Return a row for each miner and window."""
    sizes = {"miners": 3, "windows": windows, "window_seconds": 16.0, "outer_delay": outer_delay}
    net = SlowNet(make_plan(scheme="sparseloco", run_dir=run_dir, **sizes))
    try:
        async with net:
            await net.wait_until(lambda view: view.completed >= windows, timeout=180 + 20 * windows)
            return [row for node in net.network.nodes for row in rows_of(net, node, outer_delay)]
    finally:
        for link in net.links:
            link.terminate()


def rows_of(net: SlowNet, node: NodeSetup, outer_delay: int) -> list[dict[str, object]]:
    events = read_events(net.network.events(node.name))[0] if node.role == "miner" else ()
    times = [event for event in events if event["event"] == "window_time"]
    return [
        {
            "outer_delay": outer_delay,
            "node": node.name,
            "window": event["window"],
            "seconds": round(event["seconds"], 2),
        }
        | {name: round(event[name], 2) for name in PHASES}
        for event in times[WARM_UP:]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--outer-delay", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV to write (default: %(default)s)")
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    for outer_delay in given.outer_delay:
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(measure(outer_delay, given.windows, Path(folder) / "run"))
    with given.results.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if len(given.outer_delay) > 1:
        redraw("overlap_links", given.results)
    for outer_delay in given.outer_delay:
        mine = [row for row in rows if row["outer_delay"] == outer_delay]
        shares = [float(str(row["training"])) / float(str(row["seconds"])) for row in mine]
        means = {name: statistics.mean(float(str(row[name])) for row in mine) for name in ("seconds", *PHASES)}
        print(
            f"outer_delay {outer_delay}: training {statistics.mean(shares):.1%} of {len(mine)} windows, seconds:", means
        )


if __name__ == "__main__":
    main()

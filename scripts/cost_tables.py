"""Write ``docs/costs.md``: the hardware needs and the costs of each shipped hparams file.

    .venv/bin/python scripts/cost_tables.py

The planner computes every figure (``docs/plan.md`` states the accuracy of each); a test compares the page with the
planner's output.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from tplr.hparams import load_hparams
from tplr.planner.host import ACCELERATORS, Host
from tplr.planner.memory import Role
from tplr.planner.plan import Plan, make_plan
from tplr.planner.traffic import Traffic, aggregator_traffic
from tplr.training.device import DeviceSettings

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "costs.md"
SECONDS_PER_DAY = 86_400.0
DOWN, UP = 500e6, 110e6  # bits per second
SAVING = DeviceSettings.of("cuda", checkpointing="full", offload_weights=True, offload_error_feedback=True)
MACHINES = {
    "hparams-8b.json": ("h200", 8, DeviceSettings.of("cuda")),
    "hparams-70b.json": ("b200", 8, SAVING),
}
COLUMNS = (
    "hparams",
    "parameters",
    "role",
    "GPUs",
    "GPU memory each, GiB",
    "host memory, GiB",
    "disk, GiB",
    "up, GB a day",
    "down, GB a day",
    "requests a day",
    "stored, GB",
    "R2, $ a month",
)
TEXT = """# What a node needs, and what it costs

The table has a row for each hparams file of the project and each role, on one H100 of 80 GB with the device's defaults.
The two large models are planned on the GPUs that their files are made for, the one of 70 billion parameters with
`--checkpointing full --offload`. `tplr plan` computes all figures; [plan.md](plan.md) states the source of each.
`scripts/cost_tables.py` writes this page.

Prices are R2's list prices for one bucket that 20 nodes read, without free allowances; R2 does not charge for bytes
read. They do not include GPUs, power and the internet connection, nor objects of earlier runs, which stay in the bucket
until [`tplr clean`](miner.md#old-objects-in-the-bucket) deletes them. A validator's row is that of the leading
validator, which all nodes ask first. 1,000 GB a day are 93 Mbit/s without a pause: the validator of 70 billion
parameters needs 194 Mbit/s up, more than the 110 that `tplr plan` assumes.

"""

AGGREGATOR = """
An aggregator has no model. Its host memory holds the fetched updates of a window and their aggregate; the process needs
another half GB, which is not in the table. Its disk holds the aggregates of two windows that are not published yet.

"""
ALONE = (COLUMNS[0], *COLUMNS[5:])  # columns of the aggregators' table


def fitting_plan(path: Path, role: Role) -> Plan:
    """Return the plan on the GPUs that a file is made for. Raises ConfigError if it does not fit."""
    gpu, ranks, settings = MACHINES.get(path.name, ("h100", 1, DeviceSettings.of("cuda")))
    host = Host(accelerator=ACCELERATORS[gpu], ranks=ranks, host_memory=2**50, disk=2**50, down=DOWN, up=UP)
    plan = make_plan(load_hparams(path), host, role=role, settings=settings)
    plan.check()
    return plan


def row(path: Path, role: Role) -> str:
    """Return one line of the table."""
    plan = fitting_plan(path, role)
    cells = [
        f"`{path.name}`",
        f"{plan.load.parameters / 1e9:.2f} B",
        role,
        plan.host.name.replace(" x ", " × "),
        f"{plan.memory.peak / 2**30:.1f}",
        f"{math.ceil(sum(plan.memory.host.values()) / 2**30)}",
        f"{plan.disk / 2**30:.0f}",
        *_flow(plan.traffic, plan.timeline.window),
    ]
    return _line(cells)


def aggregator_row(path: Path) -> str:
    """Return one line of the table of aggregators."""
    plan = fitting_plan(path, "validator")
    hparams, update = plan.load.hparams, plan.load.update_bytes
    cells = [
        f"`{path.name}`",
        f"{update * (2 * hparams.max_topk_peers + hparams.reserve_peers) / 2**30:.1f}",
        f"{2 * update * hparams.max_topk_peers / 2**30:.1f}",
        *_flow(aggregator_traffic(plan.load, readers=plan.traffic.readers), plan.timeline.window),
    ]
    return _line(cells)


def _flow(flow: Traffic, seconds: float) -> list[str]:
    """Return the cells of a bucket's traffic and its price."""
    days = SECONDS_PER_DAY / seconds
    return [
        f"{flow.uploaded * days / 1e9:.0f}",
        f"{flow.downloaded * days / 1e9:.0f}",
        f"{(flow.class_a + flow.class_b) * days:,.0f}",
        f"{flow.stored / 1e9:.0f}",
        f"{sum(flow.dollars_per_month(seconds).values()):.2f}",
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return the text of the page."""
    roles: tuple[Role, ...] = ("miner", "validator")
    rows = [row(path, role) for path in sorted(ROOT.glob("hparams*.json")) for role in roles]
    alone = [aggregator_row(path) for path in sorted(ROOT.glob("hparams*.json"))]
    return TEXT + _table(COLUMNS, rows) + AGGREGATOR + _table(ALONE, alone)


def _table(columns: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([_line(columns), "|---" * len(columns) + "|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

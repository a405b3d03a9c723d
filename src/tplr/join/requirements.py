"""Shows a run's needs and costs on a machine: the planner's figures for a newcomer."""

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tplr.join.description import RunDescription
from tplr.planner.plan import USABLE, Plan

DAY_SECONDS = 86400.0


def show_run(run: RunDescription) -> RenderableType:
    """Render the run's description."""
    table = Table(title=f"run {run.name}", title_justify="left", show_header=False)
    start = "when enough miners have a bucket on chain" if run.first_window is None else str(run.first_window)
    rows = {
        "subnet": f"{run.netuid} on {run.network}",
        "first window": start,
        "constants": f"{run.hparams.file}, SHA-256 {run.hparams.sha256}",
        "dataset": f"{run.dataset.subfolder} in bucket {run.dataset.bucket_name}",
        "buckets": run.s3_endpoint or "on R2",
        **run.links,
    }
    for name, value in rows.items():
        table.add_row(escape(name), escape(value))
    return table


def show_costs(plan: Plan) -> RenderableType:
    """Render memory, disk, traffic and price of a node on this machine, and the reasons if it does not fit."""
    a_day = DAY_SECONDS / plan.timeline.window
    host = sum(plan.memory.host.values()) + (0 if plan.host.accelerator else plan.memory.peak * plan.host.ranks)
    flow = plan.traffic
    table = Table(title=f"a {plan.role} on {plan.host.name}", title_justify="left")
    for name in ("what", "needed", "here"):
        table.add_column(name, justify="left" if name == "what" else "right")
    usable = f"{USABLE:.0%} of {_gib(plan.host.device_memory)}"
    table.add_row("memory of each rank", _gib(plan.memory.peak), usable)
    table.add_row("memory of the host", _gib(host), _gib(plan.host.host_memory))
    table.add_row("disk for saved states", _gib(plan.disk), _gib(plan.host.disk))
    table.add_row("upload in a day", f"{flow.uploaded * a_day / 1e9:.2f} GB", _gb_a_day(plan.host.up))
    table.add_row("download in a day", f"{flow.downloaded * a_day / 1e9:.2f} GB", _gb_a_day(plan.host.down))
    if plan.role == "miner":
        table.add_row("training in a window", f"{plan.timeline.needed:.1f} s", f"of {plan.timeline.window:.0f} s")
    price = sum(flow.dollars_per_month(plan.timeline.window).values())
    table.add_row("R2, list prices", f"{price:.2f} $ a month", f"{flow.readers} readers")
    problems = [Text(f"does not fit: {one}", style="red") for one in plan.problems]
    return Group(table, *problems)


def _gb_a_day(rate: float) -> str:
    """``rate``: bits per second."""
    return f"{rate / 8 * DAY_SECONDS / 1e9:.0f} GB"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

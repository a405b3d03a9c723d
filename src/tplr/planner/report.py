"""Renders a plan as text."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tplr.planner.plan import Plan
from tplr.planner.traffic import SECONDS_PER_MONTH

MODES = ("none", "selective", "full")


def report(plan: Plan, peaks: dict[str, int]) -> RenderableType:
    """Render a whole plan. ``peaks``: peak bytes of a rank by checkpointing mode."""
    problems = [Text(f"does not fit: {one}", style="red") for one in plan.problems]
    return Group(_head(plan), _memory(plan, peaks), _window(plan), _traffic(plan), *problems)


def _head(plan: Plan) -> Text:
    load, hparams = plan.load, plan.load.hparams
    return Text(
        f"{plan.role} of a model with {_count(load.parameters)} parameters on {plan.host.name}, scheme "
        f"{hparams.outer}, {load.flops_per_token / 1e9:.2f} GFLOP a token, a miner trains on {_count(load.tokens)} "
        "tokens a window"
    )


def _memory(plan: Plan, peaks: dict[str, int]) -> Table:
    table = Table(title="Memory and disk, GiB", title_justify="left")
    table.add_column("where")
    table.add_column("kind")
    table.add_column("GiB", justify="right")
    for kind, size in plan.memory.device.items():
        table.add_row("each rank", kind, _gib(size))
    table.add_section()
    for mode, peak in peaks.items():
        chosen = " (chosen)" if mode == plan.settings.checkpointing else ""
        table.add_row("each rank", f"peak, checkpointing {mode}{chosen}", _gib(peak))
    table.add_row("each rank", "available", _gib(plan.host.device_memory))
    table.add_section()
    for kind, size in plan.memory.host.items():
        table.add_row("host", kind, _gib(size))
    table.add_row("host", "available", _gib(plan.host.host_memory))
    table.add_section()
    table.add_row("disk", "saved states", _gib(plan.disk))
    table.add_row("disk", "available", _gib(plan.host.disk))
    return table


def _window(plan: Plan) -> Table:
    line = plan.timeline
    table = Table(title=f"A window of {line.window:.0f} s", title_justify="left")
    table.add_column("phase")
    table.add_column("from s", justify="right")
    table.add_column("to s", justify="right")
    table.add_column("share", justify="right")
    for phases in (line.phases, line.links):
        for phase in phases:
            share = f"{phase.seconds / line.window:.1%}"
            table.add_row(phase.name, f"{phase.start:.1f}", f"{phase.stop:.1f}", share)
        table.add_section()
    if plan.role == "miner":
        table.add_row("training needs", "", f"{line.needed:.1f}", f"at {plan.mfu:.0%} MFU (assumed)")
        table.add_row("utilisation", "", "", f"{line.utilisation:.1%}")
        table.add_row("binds", "", "", line.binds)
    return table


def _traffic(plan: Plan) -> Table:
    flow, seconds = plan.traffic, plan.timeline.window
    table = Table(title=f"A {plan.role}'s bucket at R2's list prices", title_justify="left")
    table.add_column("what")
    table.add_column("in a window", justify="right")
    table.add_column("$ a month", justify="right")
    price = flow.dollars_per_month(seconds)
    table.add_row("uploaded", f"{flow.uploaded / 1e6:.1f} MB", "")
    table.add_row("downloaded", f"{flow.downloaded / 1e6:.1f} MB", "0 (egress is free)")
    table.add_row("class A requests", str(flow.class_a), f"{price['class A']:.2f}")
    table.add_row(f"class B requests, {flow.readers} readers", str(flow.class_b), f"{price['class B']:.2f}")
    table.add_row("stored", f"{flow.stored / 1e9:.1f} GB", f"{price['storage']:.2f}")
    table.add_section()
    table.add_row("all", f"{SECONDS_PER_MONTH / seconds:,.0f} windows a month", f"{sum(price.values()):.2f}")
    return table


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def _count(number: int) -> str:
    for unit, factor in {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}.items():
        if number >= factor:
            return f"{number / factor:.2f}{unit}"
    return str(number)

"""``tplr plan``: memory, disk, traffic, price and timeline of a run on a host, before it starts."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tplr.number_arguments import number_problems, positive_count

if TYPE_CHECKING:
    from tplr.hparams import HParams
    from tplr.planner.host import Host

NUMBERS = ("ranks", "host_memory", "disk", "down", "up", "mfu", "readers", "page_tokens", "block_time")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hparams", type=Path, default=Path("hparams.json"), help="constants of the run (default: %(default)s)")
    add("--role", choices=("miner", "validator"), default="miner", help="default: %(default)s")
    add("--gpu", default="here", help="name of a GPU, cpu, or here: this machine's (default: %(default)s)")
    add("--ranks", type=int, default=1, help="processes, one for each GPU (default: %(default)s)")
    add("--host-memory", type=float, metavar="GIB", help="of the machine (default: this machine's)")
    add("--disk", type=float, metavar="GIB", help="free for saved states (default: this machine's)")
    add("--down", type=float, default=500.0, metavar="MBIT/S", help="of the link (default: %(default)s)")
    add("--up", type=float, default=110.0, metavar="MBIT/S", help="of the link (default: %(default)s)")
    add("--mfu", type=float, default=0.4, help="model FLOPs utilisation to assume (default: %(default)s)")
    add("--checkpointing", choices=("none", "selective", "full"), default="none", help="of activations")
    add(
        "--loss-rows",
        type=positive_count,
        metavar="N",
        help="predictions whose logits exist at a time (default: the device's)",
    )
    add("--offload", action="store_true", help="error feedback and the weights before are in host memory")
    add("--readers", type=int, default=20, help="nodes that gather a miner's update (default: %(default)s)")
    add("--page-tokens", type=int, default=60_000, help="mean tokens of a page (default: %(default)s)")
    add("--block-time", type=float, default=12.0, metavar="SECONDS", help="of the chain (default: %(default)s)")
    add("--picture", type=Path, metavar="FILE.svg", help="write the window's timeline as a picture")


def run(args: argparse.Namespace) -> int:
    hparams = _checked(args)  # before the imports of PyTorch, which take seconds
    from tplr.console import Console
    from tplr.errors import StateError
    from tplr.files import atomic_write
    from tplr.planner.memory import device_memory
    from tplr.planner.picture import draw
    from tplr.planner.plan import make_plan
    from tplr.planner.report import MODES, report
    from tplr.training.device import DeviceSettings

    host = _host(args)
    settings = DeviceSettings.of(
        "cuda" if host.accelerator else "cpu",
        checkpointing=args.checkpointing,
        loss_rows=args.loss_rows,
        offload_weights=args.offload,
        offload_error_feedback=args.offload,
    )
    plan = make_plan(
        hparams,
        host,
        role=args.role,
        settings=settings,
        block_time=args.block_time,
        mfu=args.mfu,
        readers=args.readers,
        tokens_per_page=args.page_tokens,
    )
    on_cpu = host.accelerator is None
    peaks = {
        mode: device_memory(
            plan.load, args.role, replace(settings, checkpointing=mode), ranks=host.ranks, on_cpu=on_cpu
        ).peak
        for mode in MODES
    }
    Console().print(report(plan, peaks))
    try:
        if args.picture:
            atomic_write(args.picture, draw(plan.timeline, f"{args.hparams.name} on {host.name}").encode())
    except StateError as error:
        sys.stderr.write(f"tplr plan: {error}\n")
        return 2
    return 1 if plan.problems else 0


def _checked(args: argparse.Namespace) -> "HParams":
    """Return the run's constants; if they or arguments are wrong, end the process with status 2 and all problems."""
    from tplr.errors import ConfigError
    from tplr.hparams import load_hparams

    parser: argparse.ArgumentParser = args.parser
    hparams, problems = None, number_problems(args, NUMBERS)
    try:
        hparams = load_hparams(args.hparams)
    except ConfigError as error:
        problems = [*error.problems, *problems]
    if args.gpu not in ("here", "cpu"):
        from tplr.planner.host import ACCELERATORS

        if args.gpu not in ACCELERATORS:
            problems.append(f"--gpu {args.gpu}: expected here, cpu, {', '.join(ACCELERATORS)}")
    if hparams is None or problems:
        parser.error("\n".join(problems))
    return hparams


def _host(args: argparse.Namespace) -> "Host":
    """Return the machine that the checked arguments describe."""
    import torch

    from tplr.planner.host import ACCELERATORS, GIB, Host

    device = torch.device("cuda" if args.gpu == "here" and torch.cuda.is_available() else "cpu")
    host = Host.here(device, Path(), ranks=args.ranks, down=args.down * 1e6, up=args.up * 1e6)
    if args.gpu in ACCELERATORS:
        host = replace(host, accelerator=ACCELERATORS[args.gpu])
    return replace(
        host,
        host_memory=int(args.host_memory * GIB) if args.host_memory else host.host_memory,
        disk=int(args.disk * GIB) if args.disk else host.disk,
    )

"""``tplr eval``: measure an exported model, or a run's checkpoints, also during the run."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tplr.cli.network import (
    add_network_arguments,
    add_results_argument,
    results_folder,
    run_on_network,
    window_or,
)
from tplr.number_arguments import positive_count

if TYPE_CHECKING:
    from tplr.node.network_reader import NetworkReader
    from tplr.schemas import EvaluationResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", type=Path, metavar="MODEL", help="folder of tplr export; without, a run's checkpoint")
    add(
        "--window",
        default="checkpoint",
        type=window_or("latest", "checkpoint"),
        metavar="W|latest|checkpoint",
        help="of a run's model: the last window that it has applied (default: that of the newest checkpoint)",
    )
    add("--follow", action="store_true", help="evaluate each checkpoint of the run as it is published, until Ctrl-C")
    add(
        "--tasks",
        default=(),
        type=lambda text: tuple(filter(None, text.split(","))),
        metavar="NAME[,NAME]",
        help="tasks of lm-evaluation-harness (needs the extra 'eval'); held-out pages are measured always",
    )
    add("--include", type=Path, metavar="FOLDER", help="folder with definitions of more tasks")
    add("--limit", type=positive_count, metavar="N", help="questions of each task (default: all)")
    add("--batch-size", type=positive_count, default=8, metavar="N", help="sequences at once (default: %(default)s)")
    add(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the forward passes on held-out pages (default: %(default)s)",
    )
    add_results_argument(parser)
    add("--publish", action="store_true", help="put results into this hotkey's own bucket, too")
    add_network_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.follow and args.model:
        args.parser.error("--follow evaluates a run's checkpoints: leave the model's folder out")

    async def work(network: "NetworkReader", device: str) -> int:
        import asyncio
        from contextlib import ExitStack, aclosing

        from tplr.node.startup import open_listeners
        from tplr.run.evaluate import EvaluationPlan, evaluations
        from tplr.run.harness import find_tasks
        from tplr.telemetry import Telemetry

        plan = EvaluationPlan(
            tasks=await asyncio.to_thread(find_tasks, args.tasks, args.include) if args.tasks else None,
            limit=args.limit,
            batch_size=args.batch_size,
            precision=args.precision,
            command=shlex.join(["tplr", *sys.argv[1:]]),
            results=results_folder(args),
            publish=args.publish,
        )
        with ExitStack() as stack:
            listeners = open_listeners(network.arguments, stack)
            telemetry = Telemetry(role="evaluator", uid=network.comms.uid if args.publish else -1, listeners=listeners)
            chosen = "follow" if args.follow else args.model or args.window
            async with aclosing(evaluations(network, plan, chosen, device)) as results:
                async for result in results:
                    telemetry.emit("evaluation", **_fields(result))
                    print(_table(result), flush=True)  # noqa: T201 - what the command is for
        return 0

    return run_on_network(args, work, publishes=args.publish)


def _fields(result: "EvaluationResult") -> dict[str, Any]:
    """Return the fields of the event."""
    return {
        "window": result.window,
        "nats_per_token": result.held_out.nats_per_token,
        "bits_per_byte": result.held_out.bits_per_byte,
        "tasks": {name: task.metrics for name, task in result.tasks.items()},
    }


def _table(result: "EvaluationResult") -> str:
    held_out = result.held_out
    rows = [
        ("window", f"{result.window}, after {result.global_step} outer steps"),
        ("held-out pages", f"{held_out.bits_per_byte:.4f} bits per byte, {held_out.nats_per_token:.4f} nats per token"),
        ("", f"{held_out.tokens} tokens, {held_out.bytes} bytes"),
    ]
    for name, task in result.tasks.items():
        rows += [
            (name, f"{metric} {value:.4f} (version {task.task_version}, {task.samples} samples)")
            for metric, value in task.metrics.items()
        ]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in rows)

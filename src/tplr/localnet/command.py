"""``tplr localnet``: start a network, show it, report its results."""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from io import StringIO
from pathlib import Path

from tplr.console import Console
from tplr.errors import ConfigError, TplrError
from tplr.files import atomic_write
from tplr.localnet.chaos import Chaos, write_script
from tplr.localnet.live import open_display, render_summary, render_view
from tplr.localnet.network import forget_working_files, windows_in_all
from tplr.localnet.picture import draw_losses
from tplr.localnet.plan import NetworkPlan, claim_run_dir
from tplr.localnet.problems import show_problems
from tplr.localnet.reopen import own_page, reopened
from tplr.localnet.summary import Summary, rows_of, summarize
from tplr.localnet.supervisor import POLL_SECONDS, Localnet
from tplr.localnet.usage import Usage, read_usage, write_usage
from tplr.logging import logger, name_node, setup_logging
from tplr.page.command import make_page
from tplr.watch.view import NetworkView

PASSED, FAILED, CAN_NOT_START, INTERRUPTED = 0, 1, 2, 130
# Start-up of all nodes on a slow machine.
START_SECONDS = 180.0
START_SECONDS_PER_NODE = 20.0
# Windows end by the clock, but slow nodes may apply the last windows late.
SLACK = 2.0
SVG_WIDTH = 100


def main(plan: NetworkPlan) -> int:
    """Run a localnet.

    Returns:
        Exit status: 0 if every outcome passed, 1 if one failed or a process ended, 2 if it could not start, 130
        after SIGINT or SIGTERM.
    """
    setup_logging()
    name_node("localnet")
    try:
        return asyncio.run(_main(claim_run_dir(plan)))
    except ConfigError as error:
        show_problems(error)
        return CAN_NOT_START
    except (TplrError, OSError) as error:  # OSError: the disk ran full, most likely
        logger.critical("%s", error)
        return FAILED


async def _main(plan: NetworkPlan) -> int:
    console = Console()
    logger.info("run folder: %s", plan.run_dir)
    async with _cancelled_by_signals() as interrupted:
        try:
            view, summary = await _run(plan, console)
            await asyncio.to_thread(_write_results, plan, view, summary)
            page = await _write_page(plan)
        except asyncio.CancelledError:
            if not interrupted.is_set():
                raise
            logger.info("stopped; partial results are in %s", plan.run_dir)
            return INTERRUPTED
        if summary.passed and plan.keep == "results":
            await asyncio.to_thread(forget_working_files, plan.run_dir)
    console.print(render_summary(summary))
    console.print(
        f"summary.json, usage.csv, loss.png, live-view.svg, events and logs are in {plan.run_dir}", soft_wrap=True
    )
    if page:
        console.print(f"open the page of this run in a browser: {page}", soft_wrap=True)
    return PASSED if summary.passed else FAILED


async def _run(plan: NetworkPlan, console: Console) -> tuple[NetworkView, Summary]:
    usage: list[Usage] = []
    async with Localnet(plan) as net:
        limit = _time_limit(net)
        with open_display(console, plan.windows) as show:
            async with _chaos(net) if plan.chaos else contextlib.nullcontext() as chaos:
                try:
                    async with asyncio.timeout(limit), contextlib.aclosing(net.views()) as views:
                        async for view in views:
                            show(view)
                            if view.completed > (usage[-1].windows if usage else 0):
                                usage += await asyncio.to_thread(read_usage, net.pids(), windows=view.completed)
                            if view.completed >= plan.windows and (chaos is None or chaos.over):
                                break
                except TimeoutError:
                    logger.error("not all windows were completed within the time limit of %.0f s", limit)
        weights = await _final_weights(net)
    await asyncio.to_thread(write_usage, plan.run_dir / "usage.csv", usage)
    if plan.chaos:  # the windows of its outages are additional
        return net.view, summarize(net.view, weights, windows=max(plan.windows, net.view.completed))
    return net.view, summarize(net.view, weights, windows=plan.windows, window_seconds=plan.window_seconds)


def _chaos(net: Localnet) -> AbstractAsyncContextManager[Chaos]:
    roles = {node.name: node.role for node in net.network.nodes}
    plan = net.plan
    script = write_script(roles, windows=plan.windows, window_seconds=plan.window_seconds, seed=plan.seed)
    return Chaos(net, script).running()


def _time_limit(net: Localnet) -> float:
    hparams = net.network.hparams
    windows = windows_in_all(net.plan.windows, hparams.peer_list_window_margin, hparams.validator_offset)
    start = START_SECONDS + START_SECONDS_PER_NODE * len(net.nodes)
    return start + SLACK * windows * net.plan.window_seconds


async def _final_weights(net: Localnet) -> dict[int, dict[int, float]]:
    """Wait until each validator pays every miner, or its time to set weights is over; return the weights on chain."""
    miners = {miner.uid for miner in net.view.miners}
    deadline = time.monotonic() + (net.network.hparams.windows_per_weights + 1) * net.plan.window_seconds
    while True:
        weights = await net.weights()
        paid = [{uid for uid, weight in row.items() if weight > 0} for row in rows_of(net.view, weights)]
        if all(miners <= uids for uids in paid) or time.monotonic() > deadline:
            return weights
        await asyncio.sleep(POLL_SECONDS)


def _write_results(plan: NetworkPlan, view: NetworkView, summary: Summary) -> None:
    atomic_write(plan.run_dir / "summary.json", json.dumps(summary.to_json(), indent=2).encode())
    draw_losses(view, plan.run_dir / "loss.png")
    recorder = Console(record=True, width=SVG_WIDTH, file=StringIO())
    recorder.print(render_view(view, plan.windows))
    recorder.print(render_summary(summary))
    recorder.save_svg(str(plan.run_dir / "live-view.svg"), title="tplr localnet")


async def _write_page(plan: NetworkPlan) -> Path | None:
    """Write the run's page into its folder. If that fails, log a warning and return None; the run still counts."""
    try:
        request = own_page(plan.run_dir)
        await make_page(request, partial(reopened, plan.run_dir))
    except (TplrError, OSError) as error:
        logger.warning("no page of this run: %s", error)
        return None
    return request.out


@contextlib.asynccontextmanager
async def _cancelled_by_signals() -> AsyncIterator[asyncio.Event]:
    """Cancel this task at SIGINT and SIGTERM, so that processes are stopped, and set the event."""
    task, interrupted = asyncio.current_task(), asyncio.Event()
    assert task is not None

    def stop() -> None:
        if not interrupted.is_set():  # a second Ctrl-C must not interrupt the cleanup
            interrupted.set()
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield interrupted
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

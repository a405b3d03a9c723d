"""``tplr eval``: evaluates an exported model or a run's checkpoints, each once, also as they are published."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tplr.errors import (
    ChainUnavailable,
    ConfigError,
    DataError,
    HubUnavailable,
    StateError,
    StoreError,
    WindowLost,
)
from tplr.exchange.checkpoints import Checkpoint
from tplr.files import check_outputs
from tplr.logging import logger
from tplr.node.network_reader import NetworkReader
from tplr.node.replay import chosen_window
from tplr.node.windows import published_report
from tplr.run.bits_per_byte import held_out_loss
from tplr.run.folder import LoadedModel, file_hashes, load_model
from tplr.run.harness import Tasks, run_tasks
from tplr.run.record import read_record
from tplr.run.results import read_result, result_path, write_result
from tplr.run.window_model import loaded_state
from tplr.schemas import EvaluationResult, HeldOutLoss
from tplr.training.fingerprint import digest
from tplr.training.loss import Precision

TOOLS = ("tplr", "torch", "transformers", "lm-eval")


@dataclass(frozen=True)
class EvaluationPlan:
    """The evaluations in addition to held-out pages, and their settings.

    Attributes:
        tasks, limit, batch_size: as in ``run_tasks``; None: only held-out pages.
        command: the exact command line.
        results: folder of the results.
        publish: whether to also put each result into this node's bucket.
    """

    tasks: Tasks | None
    limit: int | None
    batch_size: int
    precision: Precision
    command: str
    results: Path
    publish: bool

    def asked(self) -> str:
        """Return a text that is equal for two equal evaluations of a model. Blocks."""
        names, include = (self.tasks.names, self.tasks.include) if self.tasks else ((), None)
        definitions = file_hashes(include) if include else {}
        return json.dumps([sorted(names), self.limit, self.batch_size, self.precision, definitions])


async def evaluations(
    network: NetworkReader, plan: EvaluationPlan, chosen: Path | str, device: torch.device | str = "cpu"
) -> AsyncGenerator[EvaluationResult]:
    """Yield the results of the chosen evaluations. The caller must close the generator (``contextlib.aclosing``).

    Args:
        chosen: an exported folder; or a window, as in ``chosen_window``; or ``follow`` for each checkpoint as it is
            published.

    Raises:
        As ``evaluate_folder`` and ``evaluate_window``.
    """
    if isinstance(chosen, Path):
        yield await evaluate_folder(network, chosen, plan, device)
    elif chosen == "follow":
        async with contextlib.aclosing(follow(network, plan, device)) as results:
            async for result in results:
                yield result
    else:
        window = await chosen_window(network, chosen, await network.start_window())
        yield await evaluate_window(network, window, plan, device)


async def evaluate_folder(
    network: NetworkReader, folder: Path, plan: EvaluationPlan, device: torch.device | str = "cpu"
) -> EvaluationResult:
    """Evaluate an exported folder, or return the existing result.

    Raises:
        ConfigError: the folder is not an export, or one of another run; or the result can't be written.
        TplrError: the model can't be loaded, or the pages can't be read.
    """
    record = await asyncio.to_thread(read_record, folder)
    if record.version != network.hparams.version:
        raise ConfigError(f"{folder}: of run {record.version}, this network's is {network.hparams.version}")
    loaded = await asyncio.to_thread(load_model, folder, device, torch.float32)
    weights = await asyncio.to_thread(digest, dict(loaded.model.named_parameters()))
    asked = await asyncio.to_thread(plan.asked)
    path = result_path(plan.results, record.version, record.window, f"{weights} {asked}")  # may be rounded
    found = await _done(path) or await _evaluate(network, loaded, (record.window, record.global_step), plan, path)
    return await _published(network, found, plan)


async def evaluate_window(
    network: NetworkReader, window: int, plan: EvaluationPlan, device: torch.device | str = "cpu"
) -> EvaluationResult:
    """Evaluate the run's model after a window, or return the existing result.

    Raises as ``loaded_state``, and ConfigError if the result can't be written.
    """
    run = f"{network.arguments.netuid} {await network.start_window()}"  # another run may have the same version
    asked = await asyncio.to_thread(plan.asked)
    path = result_path(plan.results, network.hparams.version, window, f"{run} {asked}")
    if found := await _done(path):
        return await _published(network, found, plan)
    with tempfile.TemporaryDirectory(prefix="tplr-eval-") as scratch:
        state = await loaded_state(network, "nearest", window, Path(scratch), device=device)
    loaded = LoadedModel(state.model, await asyncio.to_thread(network.tokenizer))
    return await _published(network, await _evaluate(network, loaded, (window, state.global_step), plan, path), plan)


async def follow(
    network: NetworkReader, plan: EvaluationPlan, device: torch.device | str = "cpu"
) -> AsyncGenerator[EvaluationResult]:
    """Evaluate each checkpoint that the leading validator publishes, oldest first, without end.

    A checkpoint that can't be read is logged, and retried after the next window while it is published.

    Raises:
        ConfigError: the evaluation itself can't work, such as a task whose definition is wrong.
    """
    done: set[int] = set()
    async for _ in network.comms.clock.ticks():
        try:
            await network.comms.refresh()
            published: list[Checkpoint] = await network.comms.leaders_checkpoints()
        except (ChainUnavailable, StoreError) as error:
            logger.warning("checkpoints not listed: %s", error)
            continue
        for one in sorted(published, key=lambda checkpoint: checkpoint.window):
            window = one.window - 1
            if window in done:
                continue
            try:
                yield await evaluate_window(network, window, plan, device)
                done.add(window)
            except (ChainUnavailable, DataError, HubUnavailable, StateError, StoreError, WindowLost) as error:
                logger.warning("window %d not evaluated: %s", window, error)


async def _done(path: Path) -> EvaluationResult | None:
    """Return the existing result; None if there is none yet. Raises ConfigError if a new one can't be written."""
    found = await asyncio.to_thread(read_result, path)
    if found:
        logger.info("evaluated already: %s", path)
    else:
        await asyncio.to_thread(check_outputs, {"--results": path})
    return found


async def _evaluate(
    network: NetworkReader, loaded: LoadedModel, at: tuple[int, int], plan: EvaluationPlan, path: Path
) -> EvaluationResult:
    """Evaluate a model after a window and a number of steps, and write its result to ``path``."""
    window, step = at
    held_out = await measure_held_out(network, loaded, window, plan.precision)
    tasks = {}
    if plan.tasks:
        tasks = await asyncio.to_thread(run_tasks, loaded, plan.tasks, limit=plan.limit, batch_size=plan.batch_size)
    result = EvaluationResult(
        window=window,
        version=network.hparams.version,
        global_step=step,
        digest=await asyncio.to_thread(digest, dict(loaded.model.named_parameters())),
        precision=plan.precision,
        held_out=held_out,
        tasks=tasks,
        command=plan.command,
        tools=_tools(),
    ).sealed()
    await asyncio.to_thread(write_result, path, result)
    logger.info("window %d: %.4f bits per byte; %s", window, held_out.bits_per_byte, path)
    return result


async def _published(network: NetworkReader, result: EvaluationResult, plan: EvaluationPlan) -> EvaluationResult:
    """The result, in this node's bucket if it is to be there; also one of before, whose publication may have failed."""
    if plan.publish:
        await network.comms.put_evaluation(result)
    return result


async def measure_held_out(
    network: NetworkReader, loaded: LoadedModel, window: int, precision: Precision
) -> HeldOutLoss:
    """Measure the loss on pages that were unknown during ``window`` and assigned to none of its included updates.

    Raises:
        ChainError, StoreError, DataError: the pages are not available.
    """
    report = await published_report(network.comms, window)
    included = [int(uid) for uid in report.included] if report else []
    hotkey = network.comms.get_hotkey(network.validator()) or ""
    async with network.data_loader() as data_loader:
        pages = await data_loader.held_out(window, hotkey, included)
    return await asyncio.to_thread(held_out_loss, *loaded, pages.batches, pages=pages.digest, precision=precision)


def _tools() -> dict[str, str]:
    found = {}
    for name in TOOLS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # the extra is not installed
            continue
    return found

"""Runs tasks of lm-evaluation-harness on a loaded model; needs the extra ``eval``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tplr.errors import ConfigError, DataError
from tplr.schemas import TaskResult

if TYPE_CHECKING:
    from tplr.run.folder import LoadedModel


@dataclass(frozen=True)
class Tasks:
    """Tasks that exist.

    Attributes:
        names: tasks of the harness, or of ``include``; a task of the harness loads its data from the hub.
        include: folder with definitions of tasks (YAML).
        manager: the harness's ``TaskManager`` that finds their definitions.
    """

    names: tuple[str, ...]
    include: Path | None
    manager: Any


def find_tasks(names: tuple[str, ...], include: Path | None) -> Tasks:
    """Find the definitions of tasks. Blocks.

    Raises:
        ConfigError: the extra is not installed, or there is no such folder or task.
    """
    if include is not None and not include.is_dir():
        raise ConfigError(f"--include {include}: no such folder; give one with definitions of tasks")
    try:
        task_manager = import_module("lm_eval.tasks").TaskManager
    except ImportError as error:
        raise ConfigError("--tasks needs the extra: .venv/bin/pip install -e '.[eval]'") from error
    if include is not None:
        # The harness's own definitions, which take seconds to read, only if they are needed.
        own = task_manager(include_path=str(include), include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return Tasks(names, include, own)
    every = task_manager(include_path=None if include is None else str(include))
    if missing := sorted(set(names) - set(every.all_tasks)):
        raise ConfigError(f"--tasks: no tasks named {', '.join(missing)}; lm-eval ls tasks lists them")
    return Tasks(names, include, every)


def run_tasks(loaded: LoadedModel, tasks: Tasks, *, limit: int | None, batch_size: int) -> dict[str, TaskResult]:
    """Run tasks; return each task's metrics, by the task's name. Blocks.

    Args:
        limit: number of questions of each task; None: all.

    Raises:
        ConfigError: a definition is wrong, or names data that do not exist.
        DataError: the data can't be read now.
    """
    # The harness's decorated signatures are not the real ones.
    simple_evaluate, models = import_module("lm_eval").simple_evaluate, import_module("lm_eval.models.huggingface")
    model, tokenizer = loaded
    positions = int(model.config.max_position_embeddings)
    harness_model = models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=positions)
    try:
        found = simple_evaluate(
            model=harness_model,
            tasks=list(tasks.names),
            limit=limit,
            bootstrap_iters=0,
            log_samples=False,
            task_manager=tasks.manager,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        # The hub or a disk may answer later; nothing else changes by waiting.
        passes = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        kind = DataError if passes else ConfigError
        raise kind(f"--tasks {','.join(tasks.names)}: {(str(error) or repr(error)).splitlines()[0][:300]}") from error
    assert found is not None  # None only on ranks other than the first
    return {name: _result(found, name) for name in sorted(found["results"])}


def _result(found: dict[str, Any], name: str) -> TaskResult:
    metrics = {
        metric: float(value)
        for metric, value in found["results"][name].items()
        if isinstance(value, int | float) and math.isfinite(value) and metric != "sample_len"
    }
    return TaskResult(
        task_version=str(found["versions"].get(name, "")),
        fewshot=int(found["n-shot"].get(name) or 0),
        metrics=metrics,
        samples=int(found.get("n-samples", {}).get(name, {}).get("effective", 0)),
    )

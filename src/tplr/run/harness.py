"""Runs tasks of lm-evaluation-harness on a loaded model; needs the extra ``eval``."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tplr.errors import ConfigError
from tplr.schemas import TaskResult

if TYPE_CHECKING:
    from tplr.run.folder import LoadedModel


def run_tasks(
    loaded: LoadedModel, names: tuple[str, ...], *, include: Path | None, limit: int | None, batch_size: int
) -> dict[str, TaskResult]:
    """Run tasks; return each task's metrics, by the task's name. Blocks.

    Args:
        names: tasks of the harness, or of ``include``; a task of the harness loads its data from the hub.
        include: folder with definitions of tasks (YAML).
        limit: number of questions of each task; None: all.

    Raises:
        ConfigError: the extra is not installed, there is no such task, or its data is not available.
    """
    try:
        # The harness's decorated signatures are not the real ones.
        simple_evaluate, models = import_module("lm_eval").simple_evaluate, import_module("lm_eval.models.huggingface")
    except ImportError as error:
        raise ConfigError("--tasks needs the extra: .venv/bin/pip install -e '.[eval]'") from error
    model, tokenizer = loaded
    positions = int(model.config.max_position_embeddings)
    harness_model = models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=positions)
    try:
        found = simple_evaluate(
            model=harness_model,
            tasks=list(names),
            limit=limit,
            bootstrap_iters=0,
            log_samples=False,
            task_manager=_tasks(names, include),
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"--tasks {','.join(names)}: {str(error).splitlines()[0][:300]}") from error
    assert found is not None  # None only on ranks other than the first
    return {name: _result(found, name) for name in sorted(found["results"])}


def _tasks(names: tuple[str, ...], include: Path | None) -> Any:
    """Return the definitions to search: the harness's own, which take seconds to read, only if needed."""
    from lm_eval.tasks import TaskManager

    if include is not None and not include.is_dir():
        raise ConfigError(f"--include {include}: no such folder; give one with definitions of tasks")
    if include is not None:
        own = TaskManager(include_path=str(include), include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    every = TaskManager(include_path=None if include is None else str(include))
    if missing := sorted(set(names) - set(every.all_tasks)):
        raise ConfigError(f"--tasks: no tasks named {', '.join(missing)}; lm-eval ls tasks lists them")
    return every


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

"""Selects the metrics of an evaluation result for a page; bounds their number and names, as results are untrusted."""

from collections.abc import Iterator

from tplr.page.document import Evaluation
from tplr.schemas import EvaluationResult

MAX_TASKS, MAX_METRICS, MAX_NAME = 24, 8, 80
# lm-evaluation-harness names a metric and its filter "acc,none", and that metric's standard error "acc_stderr,none".
ERROR = "_stderr"


def figures(result: EvaluationResult, uid: int | None) -> Iterator[Evaluation]:
    """Yield the metrics that a page shows of a result; ``uid`` published it, None for the page maker's own result."""
    held_out = result.held_out
    given = {"bits per byte": held_out.bits_per_byte, "nats per token": held_out.nats_per_token}
    for metric, value in given.items():
        yield Evaluation(window=result.window, task="held-out pages", metric=metric, value=value, error=None, uid=uid)
    for task, found in sorted(result.tasks.items())[:MAX_TASKS]:
        metrics = [name for name in sorted(found.metrics) if ERROR not in name]
        for metric in metrics[:MAX_METRICS]:
            name, _, rest = metric.partition(",")
            yield Evaluation(
                window=result.window,
                task=task[:MAX_NAME],
                metric=metric[:MAX_NAME].removesuffix(",none"),
                value=found.metrics[metric],
                error=found.metrics.get(f"{name}{ERROR},{rest}"),
                uid=uid,
            )

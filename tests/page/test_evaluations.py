"""Figures from evaluations, including those of strangers."""

from tplr.page.evaluations import MAX_METRICS, MAX_NAME, MAX_TASKS, figures
from tplr.schemas import EvaluationResult, HeldOutLoss, TaskResult


def result(**tasks: dict[str, float]) -> EvaluationResult:
    return EvaluationResult(
        window=7,
        version="1",
        global_step=3,
        digest="0" * 64,
        precision="float32",
        held_out=HeldOutLoss(pages="0" * 64, nats_per_token=4.0, bits_per_byte=1.5, tokens=10, bytes=40),
        tasks={
            name: TaskResult(task_version="1", fewshot=0, metrics=metrics, samples=30)
            for name, metrics in tasks.items()
        },
        command="tplr eval",
        tools={},
    )


def test_metrics_come_with_their_standard_errors() -> None:
    given = {"acc,none": 0.5, "acc_stderr,none": 0.1, "bpb,strict": 1.25}
    found = {(one.task, one.metric): (one.value, one.error) for one in figures(result(arithmetic=given), 4)}
    assert found == {
        ("held-out pages", "bits per byte"): (1.5, None),
        ("held-out pages", "nats per token"): (4.0, None),
        ("arithmetic", "acc"): (0.5, 0.1),
        ("arithmetic", "bpb,strict"): (1.25, None),
    }
    assert {(one.window, one.uid) for one in figures(result(), 4)} == {(7, 4)}


def test_they_are_bounded() -> None:
    metrics = {f"{number:03d}{'m' * 500}": 1.0 for number in range(200)}
    found = list(figures(result(**{f"{number:03d}{'t' * 500}": metrics for number in range(200)}), None))
    assert len(found) == 2 + MAX_TASKS * MAX_METRICS
    assert max(len(one.metric) + len(one.task) for one in found) <= 2 * MAX_NAME

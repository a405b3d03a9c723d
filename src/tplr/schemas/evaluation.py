"""Results of an evaluation of a run's model."""

from typing import Annotated, ClassVar, Literal

from pydantic import FailFast, Field

from tplr.schemas.wire import Loss, Sealed, Sha256, Uid, Window, Wire


class TaskResult(Wire):
    """One task's result of an evaluation.

    Attributes:
        task_version: version of the task's definition, as numbered by its author.
        fewshot: number of examples in each prompt.
        metrics: by name and filter, as lm-evaluation-harness names them.
        samples: number of questions.
    """

    task_version: Annotated[str, Field(max_length=64)]
    fewshot: Annotated[int, Field(ge=0, lt=2**31)]
    metrics: Annotated[dict[str, float], FailFast()] = Field(max_length=256)
    samples: Annotated[int, Field(ge=0, lt=2**53)]


class HeldOutLoss(Wire):
    """A model's loss on held-out pages.

    Attributes:
        pages: digest of the page list.
        nats_per_token: mean over all predictions.
        bits_per_byte: loss of the predictions of text, without special tokens, per byte of that text in UTF-8.
        tokens: number of predictions.
        bytes: size of the predicted text.
    """

    pages: Sha256
    nats_per_token: Loss
    bits_per_byte: Loss
    tokens: Annotated[int, Field(gt=0, lt=2**53)]
    bytes: Annotated[int, Field(gt=0, lt=2**53)]


class EvaluationResult(Sealed):
    """``evaluation-{window}-{uid}-v{version}.json``: an evaluation of a run's model on held-out pages and tasks.

    Attributes:
        window: the last window that the model has applied.
        uid: of the evaluator; None without a uid.
        version: of the run's rules, as in object keys.
        global_step: number of outer steps applied.
        digest: of the model's float32 weights, as in nodes' reports.
        precision: of the forward passes.
        tasks: by name.
        command: the exact command line.
        tools: versions of the programs that computed it, by name.
    """

    kind: ClassVar[str] = "evaluation"
    max_bytes: ClassVar[int] = 2**20

    window: Window
    uid: Uid | None = None
    version: Annotated[str, Field(max_length=64)]
    global_step: Window
    digest: Sha256
    precision: Literal["float32", "bfloat16"]
    held_out: HeldOutLoss
    tasks: Annotated[dict[str, TaskResult], FailFast()] = Field(max_length=1024)
    command: Annotated[str, Field(max_length=8192)]
    tools: Annotated[dict[str, str], FailFast()] = Field(max_length=64)

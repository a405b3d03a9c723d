"""Renders the model card: the facts of an export in words, with the commands that recompute them."""

import json
from collections.abc import Iterable, Sequence

from tplr.hparams import HParams
from tplr.run.record import Contributor, ExportRecord, WindowFacts
from tplr.schemas import EvaluationResult

CARD = "README.md"
CURVE_POINTS = 24  # points of the loss curve in the card; ``run.json`` has every window
TABLE_ROWS = 256  # contributors with the most windows


def render_card(record: ExportRecord, hparams: HParams) -> str:
    """Return the text of ``README.md``. It follows from the record and the run's constants alone."""
    sections = [
        _front_matter(hparams),
        f"# A model of run {record.version}, window {record.window}\n\n{_summary(hparams)}",
        f"## Facts\n\n{_facts(record)}",
        f"## Contributors\n\n{_contributors(record)}",
        f"## Loss\n\n{_loss(record.windows)}",
        f"## Evaluations\n\n{_evaluations(record.evaluations)}",
        f"## Recompute\n\n{_commands(record)}",
        f"## Constants of the run\n\n```json\n{_constants(hparams)}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(hparams: HParams) -> str:
    lines = [
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"tags: [templar, {hparams.model.model_type}]",
    ]
    return "\n".join(["---", *lines, "---"])


def _summary(hparams: HParams) -> str:
    return (
        f"{hparams.model.model_type}, {hparams.model.num_hidden_layers} layers, {hparams.model.hidden_size} wide, "
        f"trained by the participants of a templar network together. The folder loads with\n"
        "`AutoModelForCausalLM.from_pretrained`. Everything below can be recomputed by anyone who can read the run's "
        "public\nbuckets, and `tplr export --verify` does so."
    )


def _facts(record: ExportRecord) -> str:
    reported = "as electors with more than half of the stake report"
    agreed = reported if record.agreed else "no report was there to compare it with"
    unknown = sum(None in one.batches.values() for one in record.windows)
    tokens = f"{record.tokens:,}" + (f" (updates of {unknown} windows are deleted, and not counted)" if unknown else "")
    rows = [
        ("run", f"version {record.version} on subnet {record.netuid}, from window {record.start_window} on"),
        ("window", f"{record.window}, after {record.global_step} outer steps"),
        ("fingerprint", f"`{record.fingerprint}`, {agreed}"),
        ("digest of the float32 weights", f"`{record.digest}`"),
        ("type of the tensors in the files", record.dtype),
        ("dataset's manifest", f"`{record.dataset}`"),
        ("tokens trained on, as updates report", tokens),
        ("windows of which anything is published", _range(record.windows)),
    ]
    return _table(("fact", "value"), rows)


def _range(windows: Sequence[WindowFacts]) -> str:
    return f"{windows[0].window} to {windows[-1].window}, {len(windows)} in all" if windows else "none"


def _contributors(record: ExportRecord) -> str:
    if not record.contributors:
        return "No window's report is published."
    shown = sorted(record.contributors, key=lambda one: (-one.windows, one.uid))[:TABLE_ROWS]
    credit = (
        "No score report is readable, so no credit is known."
        if record.credit_window is None
        else f"Credit is the gain beyond chance that is a miner's own, by the scores of window {record.credit_window}."
    )
    left = len(record.contributors) - len(shown)
    more = f"\n\n{left} more are in `run.json`." if left else ""
    rows = [_contributor(one) for one in shown]
    return f"{credit}\n\n{_table(('uid', 'hotkey', 'windows', 'tokens', 'credit'), rows)}{more}"


def _contributor(one: Contributor) -> tuple[str, ...]:
    credit = "unknown" if one.credit is None else f"{one.credit:.6f}"
    return (
        str(one.uid),
        f"`{_plain(one.hotkey)}`" if one.hotkey else "unknown",
        str(one.windows),
        f"{one.tokens:,}",
        credit,
    )


def _loss(windows: Sequence[WindowFacts]) -> str:
    measured = [(one.window, one.held_out_loss) for one in windows if one.held_out_loss is not None]
    if not measured:
        return "No published score report has a loss on held-out pages."
    step = max(1, -(-len(measured) // CURVE_POINTS))
    chosen = measured[::step] + ([measured[-1]] if (len(measured) - 1) % step else [])
    rows = [(str(window), f"{loss:.4f}") for window, loss in chosen]
    head = "On held-out pages, before the window, in nats per token, as the leading validator published it."
    return f"{head}\n\n{_table(('window', 'loss'), rows)}"


def _evaluations(results: Sequence[EvaluationResult]) -> str:
    if not results:
        return "None. `tplr eval` makes them."
    rows = []
    for one in results:
        held_out = one.held_out
        rows.append(
            ("held-out pages", "", f"{held_out.bits_per_byte:.4f} bits per byte", f"{held_out.tokens:,} tokens")
        )
        rows += [
            (name, task.task_version, f"{metric} {value:.4f}", f"{task.samples} samples")
            for name, task in sorted(one.tasks.items())
            for metric, value in sorted(task.metrics.items())
        ]
    commands = "\n".join(sorted({_plain(one.command) for one in results}))
    return f"{_table(('task', 'version', 'result', 'of'), rows)}\n\n```\n{commands}\n```"


def _commands(record: ExportRecord) -> str:
    run = f"--hparams hparams.json --netuid {record.netuid}"
    return "\n".join(
        [
            "With the read keys of the run's buckets in the environment (for a localnet: `--local RUN` instead):",
            "",
            "```",
            f"tplr export --window {record.window} --dtype {record.dtype} {run} --out ../recomputed",
            f"tplr export --verify . {run}",
            f"tplr audit --window {record.window} {run}",
            "```",
        ]
    )


def _constants(hparams: HParams) -> str:
    return json.dumps(hparams.model_dump(exclude_none=True), indent=1)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _plain(text: str) -> str:
    """Return untrusted text without characters that Markdown would interpret."""
    return "".join(letter for letter in text if letter.isalnum() or letter in " -_./:=,+").strip()

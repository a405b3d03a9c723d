"""Pictures of training, evaluating and packing updates."""

import csv
import statistics
from collections.abc import Mapping
from pathlib import Path

from convergence_grid import best_finals
from figures import Rows, bars, beside, column, new_figure, save, values_of

# What the benchmark's figure may be at most; it checks this.
EVALUATION_LIMIT = 1.15


def compress(rows: Rows, path: Path) -> None:
    figure = new_figure(7.5, 3.4)
    millions = str(max(map(int, values_of(rows, "millions"))))
    colours = {"plain": "0.75", "limit": "0.5", "ours": "tab:blue"}
    found = {
        (stage, who): times
        for stage in ("encode", "aggregate", "miner")
        for who in colours
        if (times := column(rows, "ms per million", millions=millions, stage=stage, who=who, part="all"))
    }
    bars(
        figure.add_subplot(),
        {f"{stage}, {who}": times for (stage, who), times in found.items()},
        unit=f"ms per million parameters, one core, {millions}M parameters",
        colour=[colours[who] for _, who in found],
    )
    save(figure, path)


# The grid in which the default has the outer rate and the decay of ``hparams.json``.
DEFAULT_GRID, DEFAULT = "shipped-4", "the default"


def convergence(rows: Rows, path: Path) -> None:
    figure = new_figure(9, 4.6)
    axes = figure.add_subplot()
    grid = "full" if "full" in values_of(rows, "grid") else "reduced"
    found: dict[tuple[str, str, str], dict[str, Mapping[str, str]]] = {}
    for row in best_finals(rows, grid):
        found.setdefault((row["method"], row["k"], row["bits"]), {})[row["seed"]] = row
    default = {row["seed"]: row for row in rows if row["grid"] == DEFAULT_GRID} if grid == "reduced" else {}
    if default:
        found[DEFAULT, "0", "0"] = default
    for number, ((method, k, bits), by_seed) in enumerate(found.items()):
        losses = [float(row["loss"]) for row in by_seed.values()]
        sent = int(next(iter(by_seed.values()))["bytes_per_peer"]) / 1e6
        label = _label(method, k, bits)
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        axes.errorbar(sent, statistics.mean(losses), spread, fmt="os^"[number // 10], capsize=3, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="MB sent by one peer in the whole run", ylabel="held-out loss, nats per token")
    axes.set_title("The same tokens for all: mean and standard deviation over seeds", fontsize=10)
    axes.grid(alpha=0.3)
    beside(axes)
    save(figure, path)


def convergence_curves(rows: Rows, path: Path) -> None:
    """Loss against tokens and against bytes on the reduced grid, a line for each method."""
    figure = new_figure(10, 4.6)
    by_tokens, by_bytes = figure.subplots(1, 2, sharey=True)
    lines: dict[tuple[str, str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        if row["grid"] == "reduced":
            lines.setdefault((row["method"], row["k"], row["bits"]), []).append(row)
        if row["grid"] == DEFAULT_GRID:
            lines.setdefault((DEFAULT, "0", "0"), []).append(row)
    for number, ((method, k, bits), points) in enumerate(lines.items()):
        losses, style = column(points, "loss"), f"-{'os^'[number // 10]}"
        for axes, name in ((by_tokens, "tokens"), (by_bytes, "bytes_per_peer")):
            at = [value / 1e6 for value in column(points, name)]
            axes.plot(at, losses, style, markersize=3, linewidth=1, label=_label(method, k, bits))
    by_tokens.set(xlabel="million tokens, all peers together", ylabel="held-out loss, nats per token")
    by_bytes.set(xlabel="MB sent by one peer")
    by_bytes.set_xscale("log")
    by_bytes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for axes in (by_tokens, by_bytes):
        axes.grid(alpha=0.3)
    figure.legend(*by_tokens.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    save(figure, path)


def _label(method: str, k: str, bits: str) -> str:
    values = {"0": "float32", "1": "1 bit"}.get(bits, f"{bits} bits")
    return method if k == "0" else f"{method}, k = {k}, {values}"


def device(rows: Rows, path: Path) -> None:
    """What GPUs have measured, or are to measure; a CPU's toy model is left out."""
    rows = [row for row in rows if not row["device"].startswith("cpu") and row["unit"] != "tokens/s"]
    panels = list(dict.fromkeys((row["row"], row["unit"]) for row in rows))
    found = [
        {
            ", ".join(filter(None, (row["variant"], row["model"], row["device"].removeprefix("GPU"), _no_fit(row)))): [
                float(other["value"])
                for other in rows
                if all(other[key] == row[key] for key in ("row", "unit", "variant", "model", "device"))
                and other["value"] not in ("not measured", "does not fit")
            ]
            for row in rows
            if (row["row"], row["unit"]) == panel
        }
        for panel in panels
    ]
    figure = new_figure(8.5, sum(0.8 + 0.35 * len(values) for values in found))
    heights = [1 + len(values) for values in found]
    subplots = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False).flat
    for axes, (row, unit), values in zip(subplots, panels, found, strict=True):
        bars(axes, values, unit=f"{row}: {unit}")
    save(figure, path)


def _no_fit(row: Mapping[str, str]) -> str:
    return row["value"] if row["value"] == "does not fit" else ""


def engine(rows: Rows, path: Path) -> None:
    figure = new_figure(9, 3.6)
    axes = figure.subplots(1, 1)
    values = column(rows, "MB on the fullest rank")
    names = [f"{row['ranks']} rank{'s' if int(row['ranks']) > 1 else ''}" for row in rows]
    limits = column(rows, "MB of a share and the largest tensor")
    bars(axes, {name: [value] for name, value in zip(names, values, strict=True)}, unit="MB on the fullest rank")
    for text, limit in zip(axes.texts, limits, strict=True):
        text.xy = (limit, text.xy[1])  # beyond the mark, which is close to the bar's end
    axes.plot(
        limits, range(len(rows)), "|", color="tab:red", markersize=14, markeredgewidth=2, label="share + largest tensor"
    )
    axes.set_xlim(0, 1.15 * max(values + limits))
    beside(axes)
    save(figure, path)


def evaluation(rows: Rows, path: Path) -> None:
    figure = new_figure(9, 6.4)
    time, memory = figure.subplots(2, 1)
    names = [f"{row['scheme']}, {row['sequences']} x {row['tokens']}" for row in rows]
    middle = column(rows, "over forward passes")
    low, high = column(rows, "lower quartile"), column(rows, "upper quartile")
    bars(time, {name: [value] for name, value in zip(names, middle, strict=True)}, unit="time over forward passes")
    for place, ends in enumerate(zip(low, high, strict=True)):
        time.plot(ends, [place, place], color="black", label="quartiles" if place == 0 else None)
    time.axvline(EVALUATION_LIMIT, color="tab:red", linestyle="--", label=f"limit {EVALUATION_LIMIT}")
    time.set_xlim(0, 1.15 * max(high))
    for text, end in zip(time.texts, high, strict=True):
        text.xy = (max(end, EVALUATION_LIMIT), text.xy[1])
    extra = column(rows, "extra memory MB")
    bars(memory, {name: [value] for name, value in zip(names, extra, strict=True)}, unit="MB at the peak")
    for name, label, colour in (
        ("without a batch's own MB", "with a batch of two tokens", "tab:purple"),
        ("largest tensor + update MB", "limit: largest tensor and update", "tab:red"),
        ("model MB", "a copy of the model", "0.4"),
    ):
        memory.plot(
            column(rows, name), range(len(rows)), "|", color=colour, markersize=14, markeredgewidth=2, label=label
        )
    memory.set_xlim(0, 1.05 * max(column(rows, "model MB")))
    beside(time)
    beside(memory)
    save(figure, path)


def overlap(rows: Rows, path: Path) -> None:
    places = ("method", "k", "layers", "rounds", "inner_steps", "batch", "expected", "outer_rate", "decay")
    in_turn = {
        (*(row[name] for name in places), row["seed"]): float(row["loss"])
        for row in rows
        if row["guess"] == "outer_delay 0"
    }
    found: dict[str, list[float]] = {}
    for row in rows:
        base = in_turn.get((*(row[name] for name in places), row["seed"]))
        if row["guess"] != "outer_delay 0" and base is not None:
            tuning = ", tuning seed" if row["seed"] == "100" else ""
            selection = "groups" if row["method"] == "muon-grouped" else "chunk"
            expected = ", expected weights" if float(row["expected"]) else ""
            rate = "" if float(row["outer_rate"]) == 1 else f", outer rate {row['outer_rate']}"
            where = f"{selection}, k = {row['k']}{expected}{rate}"
            label = f"{where}, {row['rounds']} rounds, {row['guess']}{tuning}"
            found.setdefault(label, []).append(float(row["loss"]) - base)
    figure = new_figure(9.5, 4.2)
    bars(figure.add_subplot(), found, unit="final loss above that of outer_delay 0, same seed, nats per token")
    save(figure, path)


def wire(rows: Rows, path: Path) -> None:
    figure = new_figure(11, 4.6)
    index, quantizers = figure.subplots(1, 2)
    k = column(rows, "k", outer="demo", **{"value bits": "2"})
    for name, label, style in (("bits per index", "on the wire", "o-"), ("bound per index", "bound", "k--")):
        index.plot(k, column(rows, name, outer="demo", **{"value bits": "2"}), style, label=label)
    index.set_xscale("log", base=2)
    index.set_xticks(k, [f"{value:g}" for value in k])
    index.set(xlabel="k of 4096", ylabel="bits per index", ylim=(0, None))
    index.legend(frameon=False, loc="lower left")
    with path.with_name(f"{path.stem}_quantizers.csv").open(newline="") as file:
        tried = list(csv.DictReader(file))
    budget = tried[0]["budget"]
    found = {
        f"{row['value bits']} {'bit' if row['value bits'] == '1' else 'bits'}, {row['scale']}, {row['codebook']}, "
        f"k = {row['k']}"
        if row["scale"]
        else f"float32, k = {row['k']}": [float(row["left after all"])]
        for row in tried
        if (row["outer"], row["budget"]) == ("demo", budget) and row["rounding"] != "stochastic"
    }
    bars(quantizers, found, unit=f"share not sent at {float(budget):g} bits per parameter")
    save(figure, path)

"""Draws the pictures of ``docs/benchmarks`` from the CSV files beside them. It measures nothing.

    python scripts/benchmarks/pictures.py                   # every picture
    python scripts/benchmarks/pictures.py storage streaming # some of them

Each benchmark calls :func:`redraw` after it has written its CSV file. Bars are horizontal and start at zero,
with full labels. A bar is a median, and a dot one repetition. Legends are beside the axes.
"""

import argparse
import csv
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
MIB = 2**20
# What a benchmark's figure may be at most; the benchmarks check them.
CATCH_UP_LIMIT = 1.5
EVALUATION_LIMIT = 1.15
TRUST_SECONDS, TRUST_REQUESTS = 3.0, 20

Rows = Sequence[Mapping[str, str]]


def redraw(name: str, path: Path | None = None) -> None:
    """Draws the picture ``name`` from its CSV file, and writes it as PNG beside that.

    Args:
        path: the CSV file (default: ``docs/benchmarks/NAME.csv``).
    """
    path = path or FOLDER / f"{name}.csv"
    with path.open(newline="") as file:
        DRAWN[name](list(csv.DictReader(file)), path.with_suffix(".png"))


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, inches; nothing of it is cut off at the borders."""
    from matplotlib.figure import Figure  # here: benchmarks import this module in processes that they measure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # pyright: ignore[reportOptionalMemberAccess]
    return figure


def save(figure: "Figure", path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def beside(axes: Any) -> None:
    """The legend of ``axes``, to the right of them."""
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)


def bars(axes: Any, values: Mapping[str, Sequence[float]], *, unit: str, colour: Any = "tab:blue") -> None:
    """One bar for each name, the first on top: the median with its figure, and a dot for each value.

    An empty sequence is shown as not measured. ``colour`` is one for all, or a sequence.
    """
    middle = [statistics.median(found) if found else 0.0 for found in values.values()]
    axes.barh(list(values), middle, color=colour, height=0.7)
    for place, found in enumerate(values.values()):
        if len(found) > 1:
            axes.plot(found, [place] * len(found), ".", color="black", markersize=4)
        text = f"{middle[place]:.3g}" if middle[place] < 1000 else f"{middle[place]:,.0f}"
        end = max(found, default=0.0)
        axes.annotate(
            text if found else "not measured", (end, place), (5, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(max(found, default=0.0) for found in values.values()) or 1.0)
    repeated = any(len(found) > 1 for found in values.values())
    axes.set_xlabel(f"{unit}\n(median; dots: repetitions)" if repeated else unit)


def column(rows: Rows, name: str, **wanted: str) -> list[float]:
    """The figures in one column of the rows that have the wanted values."""
    return [float(row[name]) for row in rows if wanted.items() <= row.items() and row[name]]


def values_of(rows: Rows, name: str) -> list[str]:
    """The values of a column, each once, in the order of their first row."""
    return list(dict.fromkeys(row[name] for row in rows))


def catch_up(rows: Rows, path: Path) -> None:
    figure = new_figure(7.5, 2.4)
    axes = figure.add_subplot()
    fetch, join = column(rows, "fetch, s"), column(rows, "join, s")
    bars(axes, {"fetching alone": fetch, "joining": join}, unit="seconds")
    limit = CATCH_UP_LIMIT * statistics.median(fetch)
    axes.axvline(limit, color="0.3", linestyle="--", label=f"limit: {CATCH_UP_LIMIT} times fetching")
    axes.set_xlim(0, 1.1 * max(limit, *join))
    beside(axes)
    save(figure, path)


def chaos(rows: Rows, path: Path) -> None:
    figure = new_figure(8.5, 4.2)
    axes = figure.add_subplot()
    for run in values_of(rows, "run"):
        axes.plot(
            column(rows, "windows_applied", run=run), column(rows, "loss", run=run), "o-", markersize=3, label=run
        )
    axes.set(xlabel="windows applied", ylabel="validator's loss on held-out pages, nats per token")
    axes.grid(alpha=0.3)
    beside(axes)
    save(figure, path)


def checkpoint(rows: Rows, path: Path) -> None:
    figure = new_figure(7.5, 3.2)
    names = [name for name in rows[0] if name.endswith(", s")]
    bars(figure.add_subplot(), {name.removesuffix(", s"): column(rows, name) for name in names}, unit="seconds")
    save(figure, path)


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


def convergence(rows: Rows, path: Path) -> None:
    figure = new_figure(9, 4.6)
    axes = figure.add_subplot()
    grid = "full" if "full" in values_of(rows, "grid") else "reduced"
    found: dict[tuple[str, str, str], dict[str, Mapping[str, str]]] = {}
    for row in rows:
        if (row["grid"], row["purpose"]) == (grid, "final"):
            found.setdefault((row["method"], row["k"], row["bits"]), {})[row["seed"]] = row
    for number, ((method, k, bits), by_seed) in enumerate(found.items()):
        losses = [float(row["loss"]) for row in by_seed.values()]
        sent = int(next(iter(by_seed.values()))["bytes_per_peer"]) / 1e6
        values = {"0": "float32", "1": "1 bit"}.get(bits, f"{bits} bits")
        label = method if k == "0" else f"{method}, k = {k}, {values}"
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        axes.errorbar(sent, statistics.mean(losses), spread, fmt="os^"[number // 10], capsize=3, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="MB sent by one peer in the whole run", ylabel="held-out loss, nats per token")
    axes.set_title("The same tokens for all: mean and standard deviation over seeds", fontsize=10)
    axes.grid(alpha=0.3)
    beside(axes)
    save(figure, path)


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


def gather_faults(rows: Rows, path: Path) -> None:
    figure = new_figure(7.5, 2.8)
    axes = figure.add_subplot()
    found = {"without the five": column(rows, "alone_s")}
    found |= {f"five {kind}": column(rows, "seconds", fault=kind) for kind in values_of(rows, "fault")}
    bars(axes, found, unit="seconds")
    axes.axvline(statistics.median(column(rows, "limit_s")), color="0.3", linestyle="--", label="limit")
    beside(axes)
    save(figure, path)


def import_time(rows: Rows, path: Path) -> None:
    figure = new_figure(7.5, 3.4)
    axes = figure.add_subplot()
    found = {name: column(rows, "ratio", **{"import": name}) for name in values_of(rows, "import")}
    bars(axes, found, unit="time over that of `import torch, transformers`")
    save(figure, path)


def long_run(rows: Rows, path: Path) -> None:
    figure = new_figure(8.5, 6.4)
    memory, files = figure.subplots(2, sharex=True)
    for node in values_of(rows, "node"):
        windows = column(rows, "window", node=node)
        memory.plot(windows, [size / 1e6 for size in column(rows, "resident_bytes", node=node)], label=node)
        files.plot(windows, column(rows, "open_files", node=node), lw=0.8)
    memory.set(ylabel="resident memory, MB", ylim=(0, None))
    files.set(xlabel="windows", ylabel="open files", ylim=(0, None))
    for axes in (memory, files):
        axes.grid(alpha=0.3)
    beside(memory)
    save(figure, path)


def overlap(rows: Rows, path: Path) -> None:
    places = ("method", "k", "layers", "rounds", "inner_steps", "batch")
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
            label = f"{row['rounds']} rounds, {row['guess']}{tuning}"
            found.setdefault(label, []).append(float(row["loss"]) - base)
    figure = new_figure(8.5, 3.2)
    bars(figure.add_subplot(), found, unit="final loss above that of outer_delay 0, same seed, nats per token")
    save(figure, path)


def overlap_links(rows: Rows, path: Path) -> None:
    phases = {
        "training": ("training",),
        "upload, waits": ("uploading", "waiting_for_bound", "waiting_for_end", "waiting_for_pages"),
        "download": ("gathering",),
        "apply, save, pack": ("applying", "saving", "packing"),
    }
    figure = new_figure(8.5, 2.4)
    axes = figure.add_subplot()
    for place, value in enumerate(("0", "1")):
        left = 0.0
        for colour, (label, names) in enumerate(phases.items()):
            width = sum(statistics.mean(column(rows, name, outer_delay=value)) for name in names)
            axes.barh(place, width, left=left, color=f"C{colour}", label=None if place else label)
            left += width
    axes.set_yticks([0, 1], ["outer_delay 0", "outer_delay 1"])
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a window of 16 s, mean over windows and miners")
    beside(axes)
    save(figure, path)


def parquet_loader(rows: Rows, path: Path) -> None:
    figure = new_figure(11, 4.2)
    speed, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    rates = {name: token_rates(rows, part="speed", what=name) for name in values_of(rows, "what")}
    found = {name: values for name, values in rates.items() if values}
    order = sorted(found, key=lambda name: -statistics.median(found[name]))
    bars(speed, {name: found[name] for name in order}, unit="million tokens per second")
    resident = [value / MIB for value in column(rows, "peak", part="memory")]
    memory.plot(column(rows, "pages", part="memory"), resident)
    memory.set(xlabel="pages read", ylabel="resident memory, MiB", ylim=(0, None))
    save(figure, path)
    if any(row["part"] == "grid" for row in rows):
        parquet_loader_grid([row for row in rows if row["part"] == "grid"], path.with_name(f"{path.stem}_grid.png"))


def token_rates(rows: Rows, **wanted: str) -> list[float]:
    """Million tokens per second of each row that has the wanted values."""
    tokens, seconds = column(rows, "tokens", **wanted), column(rows, "seconds", **wanted)
    return [count / time / 1e6 for count, time in zip(tokens, seconds, strict=True)]


def parquet_loader_grid(rows: Rows, path: Path) -> None:
    names = ("pages", "batch", "length", "requests", "ahead")
    # While one parameter varies, the others keep the value that most cells have.
    kept = {name: Counter(row[name] for row in rows).most_common(1)[0][0] for name in names}
    figure = new_figure(11, 6)
    heat, *places = figure.subplots(2, 3).flat
    pages, requests = (sorted(values_of(rows, name), key=int) for name in ("pages", "requests"))
    cells = [
        [statistics.median(token_rates(rows, **kept | {"pages": p, "requests": r})) for p in pages] for r in requests
    ]
    heat.imshow(cells, aspect="auto", cmap="Blues", vmin=0)
    for y, x in itertools.product(range(len(requests)), range(len(pages))):
        heat.text(x, y, f"{cells[y][x]:.1f}", ha="center", va="center", color="white")
    heat.set_xticks(range(len(pages)), pages)
    heat.set_yticks(range(len(requests)), requests)
    heat.set(xlabel="pages", ylabel="requests at once", title="million tokens per second")
    for axes, name in zip(places, names, strict=True):
        found = {value: token_rates(rows, **kept | {name: value}) for value in sorted(values_of(rows, name), key=int)}
        bars(axes, found, unit="million tokens per second")
        axes.set(xlabel="million tokens per second", ylabel=name)
        axes.set_xlim(0, 1.3 * max(map(max, cells)))
    save(figure, path)


def storage(rows: Rows, path: Path) -> None:
    clients = sorted(values_of(rows, "client"), key=lambda name: name != "ours")
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        jobs = groups.setdefault((row["link"], "gather" if row["job"] == "gather" else row["MiB"]), [])
        if row["job"] not in jobs:
            jobs.append(row["job"])
    width = 0.8 / len(clients)
    heights = [1 + len(jobs) for jobs in groups.values()]
    figure = new_figure(12, 0.6 * sum(heights))
    panels_of_groups = figure.subplots(len(groups), 2, height_ratios=heights)
    for panels, ((link, kind), jobs) in zip(panels_of_groups, groups.items(), strict=True):
        size = values_of([row for row in rows if row["job"] == "gather"], "MiB")[0] if kind == "gather" else kind
        chosen = [row for row in rows if (row["link"], row["MiB"]) == (link, size)]
        present = [client for client in clients if client in values_of(chosen, "client")]
        for place, client in enumerate(present):
            speeds, peaks = [], []
            for job in jobs:
                seconds = column(chosen, "seconds", job=job, client=client)
                speeds.append(int(size) / statistics.median(seconds) if seconds else 0)
                peaks.append(max(0.0, *column(chosen, "peak", job=job, client=client), 0.0) / MIB)
            at = [job + width * (place - (len(present) - 1) / 2) for job in range(len(jobs))]
            for axes, values in zip(panels, (speeds, peaks), strict=True):
                axes.barh(at, values, 0.95 * width, color=f"C{clients.index(client)}", label=client)
        for axes, unit in zip(panels, ("MiB/s, median", "peak memory above idle, MiB"), strict=True):
            axes.set_yticks(range(len(jobs)), jobs)
            axes.set_ylim(-0.5, len(jobs) - 0.5)
            axes.invert_yaxis()
            axes.set_xlabel(unit)
            axes.set_title(f"{size} MiB, {link}", fontsize=10)
    beside(figure.axes[1])
    save(figure, path)


def stores(rows: Rows, path: Path) -> None:
    figure = new_figure(11, 4.2)
    ratios, memory = figure.subplots(1, 2)
    found = {}
    required = {"prepare, plain": 0.8, "fetch, plain": 0.5, "item, plain": 0.7}
    for job, side in dict.fromkeys((row["job"], row["side"]) for row in rows):
        ours = {row["repetition"]: float(row["rate"]) for row in rows if (row["job"], row["side"]) == (job, "ours")}
        theirs = {row["repetition"]: float(row["rate"]) for row in rows if (row["job"], row["side"]) == (job, side)}
        if side != "ours" and len(theirs) > 1:
            found[f"{job}, {side}"] = [ours[repetition] / rate for repetition, rate in theirs.items()]
    bars(ratios, found, unit="our rate over the other's")
    for place, name in enumerate(found):
        if name in required:
            label = "required" if name == next(iter(required)) else None
            ratios.plot([required[name]] * 2, [place - 0.4, place + 0.4], color="tab:red", linewidth=2, label=label)
    ratios.legend(frameon=False, loc="lower right")
    for side in ("ours", "torch"):
        shuffled = [row for row in rows if row["job"].startswith("shuffle") and row["side"] == side and row["bytes"]]
        windows = [int(row["job"].split()[1]) for row in shuffled]
        memory.plot(windows, [int(row["bytes"]) / MIB for row in shuffled], "o-", label=side)
    memory.set(xscale="log", xlabel="windows", ylabel="memory of a shuffled epoch, MiB", ylim=(0, None))
    beside(memory)
    save(figure, path)


def streaming(rows: Rows, path: Path) -> None:
    panels = {
        "tokens_per_s": ("million tokens per second", 1e6),
        "first_batch_s": ("seconds to the first batch", 1),
        "resume_s": ("seconds to resume", 1),
        "state_bytes": ("bytes of the state", 1),
    }
    names = sorted(values_of(rows, "library"), key=lambda name: name != "tplr.data")
    figure = new_figure(11, 6)
    for axes, (measure, (unit, scale)) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        found = {
            name: [
                float(row["value"]) / scale
                for row in rows
                if (row["library"], row["measure"]) == (name, measure)
                and "limit" not in row["job"]
                and "unigram" not in row["job"]
            ]
            for name in names
        }
        colours = ["tab:blue", *["0.6"] * (len(names) - 1)]
        if measure == "tokens_per_s":
            found["engine alone"] = [value / scale for value in column(rows, "value", measure=measure, job="limit")]
            colours.append("0.8")
        bars(axes, found, unit=unit, colour=colours)
    save(figure, path)


def streaming_libraries(rows: Rows, path: Path) -> None:
    panels = {"read": "thousand samples per second of processor time, in order", "shuffle": "the same, shuffled",
              "pack": "million tokens per second of processor time", "resume": "seconds to resume"}  # fmt: skip
    scales = {"read": 1e3, "shuffle": 1e3, "pack": 1e6, "resume": 1}
    names = values_of(rows, "library")
    figure = new_figure(11, 6)
    for axes, (job, unit) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        found = {
            name: [
                float(row["value"]) / scales[job]
                for row in rows
                if (row["library"], row["job"]) == (name, job) and row["measure"] != "error"
            ]
            for name in names
        }
        bars(axes, found, unit=unit, colour=["tab:blue", *["0.6"] * (len(names) - 1)])
    save(figure, path)


def streaming_pipeline(rows: Rows, path: Path) -> None:
    panels = list(dict.fromkeys((row["job"], row["measure"]) for row in rows))
    sides = [len({row["side"] for row in rows if (row["job"], row["measure"]) == panel}) for panel in panels]
    figure = new_figure(8.5, sum(0.7 + 0.4 * count for count in sides))
    for axes, (job, measure) in zip(
        figure.subplots(len(panels), 1, height_ratios=[1 + count for count in sides], squeeze=False).flat,
        panels,
        strict=True,
    ):
        chosen = [row for row in rows if (row["job"], row["measure"]) == (job, measure)]
        found = {side: column(chosen, "value", side=side) for side in values_of(chosen, "side")}
        bars(axes, found, unit=measure, colour=["tab:blue" if side == "tplr.data" else "0.6" for side in found])
        axes.set_title(job, fontsize=10)
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


def stream_state(rows: Rows, path: Path) -> None:
    found = {}
    for job in values_of(rows, "job"):
        measure = "cpu_seconds" if job == "state" else "resume_seconds"
        found[f"{job}, {'processor time' if job == 'state' else 'time'}"] = [
            one / other
            for one, other in zip(
                *(column(rows, "value", job=job, version=side, measure=measure) for side in ("before", "now")),
                strict=True,
            )
        ]
    before, now = (column(rows, "value", job="state", version=side, measure="bytes") for side in ("before", "now"))
    found["state, bytes"] = [one / other for one, other in zip(before, now, strict=True)]
    figure = new_figure(8.5, 3)
    axes = figure.add_subplot()
    bars(axes, found, unit="before / now; above 1 this version takes less")
    axes.axvline(1, color="0.3", linestyle="--", label="equal")
    beside(axes)
    save(figure, path)


def trust(rows: Rows, path: Path) -> None:
    figure = new_figure(9, 4.2)
    seconds, requests = figure.subplots(1, 2, sharey=True)
    cases = dict.fromkeys((row["case"], row["validators"]) for row in rows)
    for axes, name, unit, limit in (
        (seconds, "decided_s", "seconds until all know the decision", TRUST_SECONDS),
        (requests, "requests", "requests of a validator", TRUST_REQUESTS),
    ):
        found = {f"{count}, {case}": column(rows, name, case=case, validators=count) for case, count in cases}
        bars(axes, found, unit=unit)
        axes.axvline(limit, color="0.3", linestyle="--", label="limit with five")
    requests.invert_yaxis()  # shared: inverted twice
    beside(requests)
    save(figure, path)


def versions(rows: Rows, path: Path) -> None:
    found: dict[str, list[float]] = {}
    for job in values_of(rows, "job"):
        before, now = (column(rows, "cpu_seconds", job=job, version=side) for side in ("before", "now"))
        found[job] = [one / other for one, other in zip(before, now, strict=True)]
    figure = new_figure(8.5, 4.4)
    axes = figure.add_subplot()
    bars(axes, found, unit="processor time before / now; above 1 this version takes less")
    axes.axvline(1, color="0.3", linestyle="--", label="equal")
    beside(axes)
    save(figure, path)


DRAWN: dict[str, Callable[[Rows, Path], None]] = {
    draw.__name__: draw
    for draw in (
        catch_up,
        chaos,
        checkpoint,
        compress,
        convergence,
        device,
        engine,
        evaluation,
        gather_faults,
        import_time,
        long_run,
        overlap,
        overlap_links,
        parquet_loader,
        storage,
        stores,
        stream_state,
        streaming,
        streaming_libraries,
        streaming_pipeline,
        trust,
        versions,
        wire,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(DRAWN)}; none: all measured")
    names = parser.parse_args().names
    if unknown := set(names) - set(DRAWN):
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    for name in names or [one for one in DRAWN if (FOLDER / f"{one}.csv").exists()]:
        redraw(name)


if __name__ == "__main__":
    main()

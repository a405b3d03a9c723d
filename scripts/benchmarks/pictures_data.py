"""Pictures of loading and streaming data."""

import itertools
import statistics
from collections import Counter
from pathlib import Path

from figures import MIB, Rows, bars, beside, column, new_figure, save, values_of


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
    """Return the million tokens per second of each matching row."""
    tokens, seconds = column(rows, "tokens", **wanted), column(rows, "seconds", **wanted)
    return [count / time / 1e6 for count, time in zip(tokens, seconds, strict=True)]


def parquet_loader_grid(rows: Rows, path: Path) -> None:
    names = ("pages", "batch", "length", "requests", "ahead")
    # While one parameter varies, the others keep their most frequent value.
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
        found = {side: [one / 1000 for one in column(chosen, "value", side=side)] for side in values_of(chosen, "side")}
        unit = f"thousand samples per second{' of processor time' if measure == 'samples_per_cpu_s' else ''}"
        bars(axes, found, unit=unit, colour=["tab:blue" if side == "tplr.data" else "0.6" for side in found])
        axes.set_title(job, fontsize=10)
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

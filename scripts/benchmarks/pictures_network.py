"""Pictures of nodes, storage and whole networks."""

import statistics
from pathlib import Path

from figures import MIB, Rows, bars, beside, column, new_figure, save, values_of

# Upper limits of the benchmarks' figures; the benchmarks check them.
CATCH_UP_LIMIT = 1.5
TRUST_SECONDS, TRUST_REQUESTS = 3.0, 20


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


def trust(rows: Rows, path: Path) -> None:
    figure = new_figure(9, 4.2)
    seconds, requests = figure.subplots(1, 2, sharey=True)
    cases = dict.fromkeys((row["case"], row["validators"]) for row in rows)
    for axes, name, unit, limit in (
        (seconds, "decided_s", "seconds until all know the decision", TRUST_SECONDS),
        (requests, "requests", "requests of a validator", TRUST_REQUESTS),
    ):
        found = {
            f"{count} {'elector' if count == '1' else 'electors'}, {case}": column(
                rows, name, case=case, validators=count
            )
            for case, count in cases
        }
        bars(axes, found, unit=unit)
        axes.axvline(limit, color="0.3", linestyle="--", label="limit with five")
    requests.invert_yaxis()  # shared: inverted twice
    beside(requests)
    save(figure, path)

"""Pictures of scores and pay."""

from pathlib import Path

from figures import Rows, column, new_figure, save, values_of

# Title, and the rows of each panel.
SPLIT_PANELS = (
    ("unit norms", {"step": "unit", "kept": "0.2"}),
    ("unit norms, nothing left out", {"step": "unit", "kept": "1", "entries": "100000000"}),
    ("unit norms, nothing left out, 20,000 entries", {"step": "unit", "kept": "1", "entries": "20000"}),
    ("fewer inner steps, cap of honest steps", {"step": "steps", "cap": "honest", "kept": "0.2"}),
    ("fewer inner steps, cap of all steps", {"step": "steps", "cap": "all", "kept": "0.2"}),
    ("smaller batches, cap of honest steps", {"step": "batches", "cap": "honest", "kept": "0.2"}),
)


def split_pay(rows: Rows, path: Path) -> None:
    figure = new_figure(11, 6.6)
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, (title, wanted) in zip(panels.flat, SPLIT_PANELS, strict=True):
        for number, power in enumerate(values_of(rows, "power")):
            for others, style in (("3", "o--"), ("9", "o-")):
                chosen = {**wanted, "power": power, "others": others}
                at, colour = column(rows, "part over whole", **chosen), f"C{number}"
                label = f"power {power}, beside {others}"
                axes.plot(at, column(rows, "ratio", **chosen), style, color=colour, markersize=3, label=label)
                low, high = column(rows, "least", **chosen), column(rows, "largest", **chosen)
                axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(1, color="0.3", linewidth=0.8)
        axes.set_title(title, fontsize=10)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(0.01, 40)
        axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("cosine of a part over a whole's")
    for axes in panels[:, 0]:
        axes.set_ylabel("pay of 8 parts over a whole's")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)

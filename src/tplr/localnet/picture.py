"""Draws the loss curves of a run."""

from pathlib import Path

from tplr.watch.view import NetworkView


def draw_losses(view: NetworkView, path: Path) -> None:
    """Write training loss of each miner and the validator's loss on held-out pages, by window, as PNG. Blocks."""
    # Not pyplot, which looks for a display and keeps figures in a global list.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    start = view.start_window or 0
    for miner in view.miners:
        windows = sorted(miner.training_loss)
        losses = [miner.training_loss[window] for window in windows]
        axes.plot([window - start + 1 for window in windows], losses, linewidth=1, alpha=0.7, label=miner.name)
    measured = sorted(view.validator.held_out_loss)
    axes.plot(
        [window - start + 1 for window in measured],
        [view.validator.held_out_loss[window] for window in measured],
        color="black",
        linewidth=2,
        marker="o",
        markersize=3,
        label="validator, held-out pages",
    )
    axes.set(title="templar localnet", xlabel="window of the run", ylabel="loss, nats a token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    canvas.print_png(path)

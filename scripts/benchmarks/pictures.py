"""Draws the pictures of ``docs/benchmarks`` from the CSV files beside them. It takes no measurements.

    python scripts/benchmarks/pictures.py                   # every picture
    python scripts/benchmarks/pictures.py storage streaming # some of them

Each benchmark calls :func:`redraw` after it has written its CSV file.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

from figures import Rows
from pictures_data import (
    parquet_loader,
    stores,
    stream_state,
    streaming,
    streaming_libraries,
    streaming_pipeline,
    versions,
)
from pictures_network import (
    catch_up,
    chaos,
    checkpoint,
    gather_faults,
    import_time,
    long_run,
    overlap_links,
    storage,
    trust,
)
from pictures_scoring import split_pay
from pictures_training import compress, convergence, convergence_curves, device, engine, evaluation, overlap, wire

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"

DRAWN: dict[str, Callable[[Rows, Path], None]] = {
    draw.__name__: draw
    for draw in (
        catch_up,
        chaos,
        checkpoint,
        compress,
        convergence,
        convergence_curves,
        device,
        engine,
        evaluation,
        gather_faults,
        import_time,
        long_run,
        overlap,
        overlap_links,
        parquet_loader,
        split_pay,
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


def redraw(name: str, path: Path | None = None) -> None:
    """Draws the picture ``name`` from its CSV file, and writes it as PNG beside the CSV file.

    Args:
        path: the CSV file (default: ``docs/benchmarks/NAME.csv``).
    """
    path = path or FOLDER / f"{name}.csv"
    with path.open(newline="") as file:
        DRAWN[name](list(csv.DictReader(file)), path.with_suffix(".png"))


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

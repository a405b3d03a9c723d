"""``tplr data prepare`` converts raw records to a token store."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tplr.cli.data.print_line import print_line

if TYPE_CHECKING:
    from tplr.stores.preprocess.pipeline import OnProgress, Prepared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files of JSON Lines, JSON, CBOR or parquet, also compressed, or folders: paths, s3://, https://, …, with "
        "{a..b} and globs",
    )
    add("-o", "--out", type=Path, required=True, help="folder of the store; resumes an unfinished store")
    add("-c", "--config", type=Path, required=True, help="JSON: sections or sources, masks, packing, output")
    add("--tokenizer", "--tokenizer_path", type=Path, required=True, metavar="PATH", help="folder of a tokenizer")
    add("--engine", choices=("local", "ray"), default="local", help="where workers run (default: local)")
    add("--workers", type=int, metavar="N", help="processes, or actors on Ray (default: 1; all CPUs of Ray)")
    add("--batch-size", "--batch_size", type=int, metavar="N", help="records per work item (default: 256)")


def run(args: argparse.Namespace) -> int:
    from tplr.errors import ConfigError
    from tplr.stores.preprocess.config import PipelineConfig
    from tplr.stores.preprocess.pipeline import BATCH_SIZE, prepare

    batch_size = BATCH_SIZE if args.batch_size is None else args.batch_size
    for name, value in (("--batch-size", batch_size), ("--workers", 1 if args.workers is None else args.workers)):
        if value < 1:
            raise ConfigError(f"{name} {value}: expected 1 or more")
    config = PipelineConfig.from_file(args.config)
    with _progress_bar() as on_progress:
        prepared = prepare(
            args.inputs,
            args.out,
            config,
            args.tokenizer,
            engine=args.engine,
            workers=args.workers,
            batch_size=batch_size,
            on_progress=on_progress,
        )
    print_line(_summary(prepared))
    return 0


def _summary(prepared: "Prepared") -> str:
    counts = prepared.counts
    skipped = ", ".join(f"{count} × {reason}" for reason, count in sorted(counts.skipped.items()))
    return (
        f"{prepared.folder}: {counts.tokens} tokens of {counts.used} records in {len(prepared.shards)} shards; "
        f"left out: {skipped or 'nothing'}; cut off: {counts.cut_tokens} tokens"
    )


@contextmanager
def _progress_bar() -> "Iterator[OnProgress]":
    """Show a progress bar over the bytes of the inputs, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("Tokenizing"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[records]} records"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("Tokenizing", total=None, records=0)
        yield lambda read, total, counts: bar.update(task, completed=read, total=total, records=counts.read)

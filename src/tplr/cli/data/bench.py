"""``tplr data bench``: measures a pipeline over files: first batch, tokens per second, resume, size of the state."""

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tplr.cli.data.print_line import print_line
from tplr.cli.data.tokenizer import load as load_tokenizer
from tplr.logging import logger
from tplr.number_arguments import positive_count, positive_number
from tplr.resources import available_cores

if TYPE_CHECKING:
    from tplr.data import CheckpointableDataset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("urls", nargs="+", metavar="URL", help="files, with {a..b} and globs: paths, s3://, r2://, https://, …")
    add("--tokenizer", required=True, metavar="NAME", help="folder or Hugging Face name")
    add(
        "--format", default="auto", choices=("auto", "jsonl", "json", "cbor", "parquet"), help="default: from the names"
    )
    add("--column", default="text", metavar="NAME", help="column of the text (default: text)")
    add("--length", type=positive_count, default=2048, metavar="N", help="tokens per sequence (default: 2048)")
    add("--batch", type=positive_count, default=8, metavar="N", help="sequences per batch (default: 8)")
    add("--seconds", type=positive_number, default=10.0, metavar="S", help="seconds to measure (default: 10)")


def run(args: argparse.Namespace) -> int:
    from tplr.data import CheckpointableDataset

    tokenizer = load_tokenizer(args.tokenizer)
    dataset = (
        CheckpointableDataset.from_files(args.urls, format=args.format)
        .tokenize(tokenizer, target_column=args.column)
        .ensure_bos_eos(tokenizer)
        .concat_chunk(args.length)
        .batch(args.batch)
    )
    state = _measure(dataset, args.seconds)
    if state is not None:
        began = time.perf_counter()
        with dataset.iter(state_dict=state) as batches:
            next(batches, None)
        print_line(f"resume           {(time.perf_counter() - began) * 1e3:10.1f} ms to the next batch")
        print_line(f"state            {_size(state):10d} bytes")
    return 0


def _measure(dataset: "CheckpointableDataset", seconds: float) -> dict[str, Any] | None:
    """Read for ``seconds`` or to the end. Returns the state there, or None if there was no batch."""
    began = shown = time.perf_counter()
    first, tokens = 0.0, 0
    with dataset.iter() as batches:
        for batch in batches:
            now = time.perf_counter()
            first = first or now - began
            tokens += batch["input_ids"].numel()
            if now - began >= seconds:
                break
            if now - shown >= 1:
                shown = now
                logger.info("%d tokens, %d of %d s", tokens, now - began, seconds)
        if not tokens:
            print_line("no batch: the files hold fewer tokens than one sequence")
            return None
        took = time.perf_counter() - began
        state, report = batches.state_dict(), batches.report()
    print_line(f"first batch      {first * 1e3:10.1f} ms")
    print_line(f"tokens per second{tokens / took:10.0f}, {tokens} in {took:.1f} s on {available_cores()} cores")
    print_line(f"report           {report}")
    return state


def _size(state: dict[str, Any]) -> int:
    """Size in bytes of the file that ``save_state`` writes."""
    from tplr.data import save_state

    with tempfile.TemporaryDirectory() as folder:
        save_state(Path(folder, "state"), state)
        return Path(folder, "state").stat().st_size

"""``tplr data peek``: shows records of files, their types, and statistics of their lengths."""

import argparse
import statistics
from collections import Counter
from typing import Any

from tplr.cli.data.print_line import print_line
from tplr.cli.data.tokenizer import load as load_tokenizer
from tplr.number_arguments import positive_count

_SHOWN = 100  # characters of a value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("urls", nargs="+", metavar="URL", help="files, with {a..b} and globs: paths, s3://, r2://, https://, …")
    add(
        "--format", default="auto", choices=("auto", "jsonl", "json", "cbor", "parquet"), help="default: from the names"
    )
    add("--samples", type=int, default=3, metavar="N", help="records to show (default: 3)")
    add(
        "--records",
        type=positive_count,
        default=1000,
        metavar="N",
        help="records to compute statistics of (default: 1000)",
    )
    add("--column", default="text", metavar="NAME", help="column of the text (default: text)")
    add("--tokenizer", metavar="NAME", help="folder or Hugging Face name; adds statistics of tokens")


def run(args: argparse.Namespace) -> int:
    from tplr.data import CheckpointableDataset

    dataset = CheckpointableDataset.from_files(args.urls, format=args.format).take(args.records)
    if args.tokenizer:
        dataset = dataset.tokenize(load_tokenizer(args.tokenizer), target_column=args.column)
    types: dict[str, Counter[str]] = {}
    characters: list[int] = []
    tokens: list[int] = []
    count = 0
    with dataset.iter() as samples:
        for count, sample in enumerate(samples, 1):
            if count <= args.samples:
                _show(count - 1, sample)
            for column, value in sample.items():
                types.setdefault(column, Counter())[type(value).__name__] += 1
            if isinstance(sample.get(args.column), str):
                characters.append(len(sample[args.column]))
            if args.tokenizer:
                tokens.append(len(sample["input_ids"]))
        report = samples.report()
    print_line(f"{count} records of {report['files']} files, {report.get('bad_records', 0)} bad ones left out")
    for column, kinds in types.items():
        print_line(f"  {column}: {', '.join(f'{kind} in {number}' for kind, number in kinds.most_common())}")
    _summarise("characters", characters)
    _summarise("tokens", tokens)
    if sum(tokens):
        print_line(f"{sum(characters) / sum(tokens):.2f} characters a token")
    return 0


def _show(number: int, sample: dict[str, Any]) -> None:
    print_line(f"record {number}")
    for column, value in sample.items():
        if column != "attention_mask":
            text = repr(value)
            print_line(f"  {column}: {text if len(text) <= _SHOWN else text[:_SHOWN] + ' …'}")


def _summarise(what: str, lengths: list[int]) -> None:
    if lengths:
        low, middle, high = min(lengths), statistics.median(lengths), max(lengths)
        print_line(f"{sum(lengths)} {what}; a record has {low} to {high}, the median {middle:g}")

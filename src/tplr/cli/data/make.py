"""``tplr data make`` builds a dataset of pages from text, JSON Lines or parquet."""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tplr.cli.data.print_line import print_line

if TYPE_CHECKING:
    from tplr.pages.texts import Documents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="folder to create")
    add(
        "sources",
        nargs="+",
        metavar="[CONFIG=]SOURCE",
        help="file, or folder with all files below it, for config CONFIG (default: the source's own name); "
        "several sources of one config are joined in this order",
    )
    add("--field", default="text", help="field of JSON Lines, column of parquet files (default: text)")
    add("--skip-bad", action="store_true", help="count invalid records and continue (default: stop at the first)")
    add(
        "--row-characters",
        type=int,
        metavar="N",
        help="split documents at line ends into rows of at most N characters; the loader drops what exceeds a sequence",
    )
    add(
        "--rows-per-group",
        type=int,
        metavar="N",
        help="rows of a row group, the unit of a read (default: 1000)",
    )
    add("--rows-per-shard", type=int, metavar="N", help="rows of a file (default: 250 groups)")
    add(
        "--address",
        choices=("exact", "group-average"),
        default="exact",
        help="rule for a page's row number; group-average is that of existing networks (default: exact)",
    )


def run(args: argparse.Namespace) -> int:
    from tplr.errors import ConfigError
    from tplr.logging import logger
    from tplr.pages.build import ROWS_PER_GROUP, write_dataset
    from tplr.pages.texts import Documents, split_rows

    if args.row_characters is not None and args.row_characters < 1:
        raise ConfigError(f"--row-characters {args.row_characters}: expected 1 or more")
    rows_per_group = ROWS_PER_GROUP if args.rows_per_group is None else args.rows_per_group
    rows_per_shard = 250 * rows_per_group if args.rows_per_shard is None else args.rows_per_shard
    with write_dataset(
        args.out, address=args.address, rows_per_group=rows_per_group, rows_per_shard=rows_per_shard
    ) as writer:
        for config, paths in _sources(args.sources).items():
            documents = Documents(paths, field=args.field, skip_bad=args.skip_bad)
            texts = split_rows(documents, args.row_characters) if args.row_characters else documents
            rows = writer.add(config, _with_progress(texts, documents, config))
            skipped = ", ".join(f"{count} × {reason}" for reason, count in sorted(documents.skipped.items()))
            logger.info("%s: %d rows of %d files; skipped: %s", config, rows, len(paths), skipped or "nothing")
    print_line(f"{args.out} is complete; its manifest's SHA-256 is {_manifest_sha256(args.out)}")
    return 0


def _sources(given: Iterable[str]) -> dict[str, list[Path]]:
    """Return the files of each config."""
    from tplr.logging import logger
    from tplr.pages.texts import text_files

    configs: dict[str, list[Path]] = {}
    for text in given:
        name, named, path = text.partition("=")
        source = Path(path if named else text)
        files, others = text_files(source)
        if others:
            logger.warning("%s: %d files with other suffixes are left out", source, others)
        configs.setdefault(name if named else source.resolve().name.split(".")[0], []).extend(files)
    return configs


def _with_progress(texts: Iterable[str], documents: "Documents", name: str) -> Iterator[str]:
    """Yield the texts, and log the progress."""
    from tplr.storage.progress import ProgressLog

    progress = ProgressLog(f"making {name}")
    for number, text in enumerate(texts):
        if number % 256 == 0:
            progress(documents.bytes_read, documents.total_bytes)
        yield text


def _manifest_sha256(folder: Path) -> str:
    from tplr.pages.manifest import METADATA, SHARD_SIZES, parse_manifest

    return parse_manifest((folder / METADATA).read_bytes(), (folder / SHARD_SIZES).read_bytes(), "").sha256

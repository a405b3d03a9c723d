"""``tplr data page`` shows the rows of pages and their numbers of tokens."""

import argparse
import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tplr.cli.data.location import add_folder_argument, add_subfolder_argument, open_locations
from tplr.cli.data.print_line import print_line
from tplr.errors import ConfigError
from tplr.schemas import PageRef

if TYPE_CHECKING:
    from tplr.hparams import HParams
    from tplr.pages.manifest import DatasetManifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("places", nargs="*", metavar="CONFIG:ROW", help="pages by their first row")
    add("--uid", type=int, metavar="U", help="instead: the pages that uid U trains on")
    add("--window", type=int, metavar="W", help="the window of --uid")
    add("--block-hash", metavar="HEX", help="hash of the first block of window W-1; profile hardened needs it")
    add("--seed", help="instead: the pages that this seed draws, a number or a text")
    add("--offset", type=int, default=0, metavar="N", help="first word of the seed's stream (default: 0)")
    add("--pages", type=int, default=1, metavar="N", help="number of pages to draw (default: 1)")
    add(
        "--hparams",
        type=Path,
        metavar="FILE",
        help="count tokens as the nodes of this run do; --uid needs it",
    )
    add("--rows", type=int, default=5, metavar="N", help="rows of each page to show (default: 5)")
    add_folder_argument(parser, "read")
    add_subfolder_argument(parser)


def run(args: argparse.Namespace) -> int:
    return asyncio.run(_show(args))


async def _show(args: argparse.Namespace) -> int:
    from tplr.hparams import load_hparams
    from tplr.pages.page_draw import pages_digest
    from tplr.pages.reader import PageReader

    hparams = load_hparams(args.hparams) if args.hparams else None
    tokenizer = hparams and hparams.load_tokenizer(args.hparams.parent)
    async with open_locations(args, "read") as locations:
        reader = await PageReader.open([location.store for location in locations], locations[0].prefix)
        manifest = reader.manifest
        pages = _chosen(args, hparams, manifest)
        for page in pages:
            texts = await reader.texts(page)
            tokens = _counts(tokenizer, texts, hparams.sequence_length) if hparams else [None] * len(texts)
            _print(page, texts, tokens, args.rows)
    print_line(f"manifest {manifest.sha256}, address {manifest.address}")
    print_line(f"digest of these pages {pages_digest(pages, manifest.sha256)}")
    return 0


def _chosen(args: argparse.Namespace, hparams: "HParams | None", manifest: "DatasetManifest") -> tuple[PageRef, ...]:
    from tplr.pages.page_draw import next_pages
    from tplr.seeds import PageDraw, page_draw

    if sum((bool(args.places), args.uid is not None, args.seed is not None)) != 1:
        raise ConfigError("no pages given: use CONFIG:ROW, or --uid and --window, or --seed")
    if args.places:
        return tuple(_parsed(place, manifest) for place in args.places)
    configs = manifest.configs.values()
    if args.seed is not None:
        seed = int(args.seed) if re.fullmatch(r"-?[0-9]+", args.seed) else args.seed
        return next_pages(configs, offset=args.offset, n_pages=args.pages, seed=seed)
    if hparams is None or args.window is None:
        raise ConfigError("--uid needs --window and --hparams: they determine its pages")
    if hparams.profile == "hardened" and not args.block_hash:
        raise ConfigError("profile hardened draws pages from --block-hash: of the first block of the window before")
    n_pages = hparams.pages_per_window
    draw: PageDraw = page_draw(
        hparams.profile,
        uid=args.uid,
        window=args.window,
        pages_per_window=n_pages,
        block_hash=args.block_hash or "",
    )
    return next_pages(configs, offset=draw.offset, n_pages=n_pages, seed=draw.seed)


def _parsed(place: str, manifest: "DatasetManifest") -> PageRef:
    config, _, row = place.rpartition(":")
    if not config or not re.fullmatch("[0-9]+", row):
        raise ConfigError(f"page {place!r}: expected CONFIG:ROW")
    if config not in manifest.configs:
        raise ConfigError(f"page {place}: no such config; there are {', '.join(manifest.configs)}")
    return PageRef(config, int(row), manifest.configs[config].split)


def _counts(tokenizer: Any, texts: Sequence[str], longest: int) -> list[int]:
    """Return the number of trained tokens of each row: the first ``longest``, and an EOS if they do not end with it."""
    rows = tokenizer([*texts], truncation=True, max_length=longest)["input_ids"] if texts else []
    return [len(ids) + (ids[-1] != tokenizer.eos_token_id) if ids else 0 for ids in rows]


def _print(page: PageRef, texts: Sequence[str], tokens: Sequence[int | None], rows: int) -> None:
    counted = "" if None in tokens else f", {sum(filter(None, tokens))} tokens"
    print_line(
        f"{page.config}:{page.row} ({page.split}): {len(texts)} rows, {sum(map(len, texts))} characters{counted}"
    )
    for number, (text, count) in enumerate([*zip(texts, tokens, strict=True)][:rows]):
        # repr, as a text may hold control characters of the terminal
        print_line(f"{page.row + number:>10}  {'' if count is None else count:>6}  {text[:80]!r}")

"""Takes a picture of a run's page in Chromium: those of docs/page.md and of the README.

    python scripts/page_picture.py docs/images/page.png --page runs/latest/page.html --height 1290
    python scripts/page_picture.py docs/images/page-dark.png --theme dark --window 80 --uid 5

Without ``--page`` the run is a synthetic one of 20 miners, and the picture begins at the miners. Needs Chromium, and
the extra ``test``; without them it says how to install them.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "page" / "support"))

import pytest
from browser import open_browser
from synthetic_run import synthetic_document

from tplr.page.render import render

WIDTH = 1240
BELOW_THE_BAR = "one => scrollBy(0, one.getBoundingClientRect().top - 70)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("--page", type=Path, help="of a run (default: a synthetic run of 20 miners)")
    parser.add_argument("--windows", type=int, default=60, help="of the synthetic run")
    parser.add_argument("--window", type=int, help="the selected one (default: the last)")
    parser.add_argument("--uid", type=int, help="of the selected miner (default: the first)")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--height", type=int, default=900)
    args = parser.parse_args()
    selected = [f"{key}={value}" for key, value in (("window", args.window), ("uid", args.uid)) if value is not None]
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        page = args.page
        if page is None:
            page = Path(folder) / "page.html"
            page.write_bytes(render(synthetic_document(args.windows, 20)))
        fragment = "#" + "&".join(selected) if selected else ""
        look = {"width": WIDTH, "height": args.height, "scheme": args.theme, "fragment": fragment}
        with browser.page(page.resolve(), **look) as opened:
            if args.page is None:
                opened.tab.get_by_text("Miners and windows").evaluate(BELOW_THE_BAR)
            opened.tab.screenshot(path=args.picture)


if __name__ == "__main__":
    try:
        main()
    except pytest.skip.Exception as missing:  # of tests that need a browser
        sys.exit(str(missing))

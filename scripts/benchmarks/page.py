"""Measures the size of a run's page, and the time until a browser has drawn all of it.

    .venv/bin/python scripts/benchmarks/page.py --windows 2000 --miners 20

The run is synthetic; the validator's own code writes its explanations. Needs Chromium, and the extra ``test``.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "page" / "support"))

from browser import open_browser
from synthetic_run import synthetic_document

from tplr.page.render import render, to_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=2000)
    parser.add_argument("--miners", type=int, default=20)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    document = synthetic_document(args.windows, args.miners)
    began = time.perf_counter()
    page = render(document)
    print(f"rendered in {time.perf_counter() - began:.1f} s")
    print(f"document {len(to_json(document)) / 1e6:.2f} MB, page {len(page) / 1e6:.2f} MB")
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        path = Path(folder) / "page.html"
        path.write_bytes(page)
        taken, computed = [], []
        for _ in range(args.runs):
            with browser.page(path) as opened:
                taken.append(opened.milliseconds)
                computed.append(opened.processor_seconds)
    print(f"drawn after {', '.join(map(str, sorted(taken)))} ms, median {median(taken):.0f} ms")
    print(f"processor time of its main thread {median(computed):.2f} s")


if __name__ == "__main__":
    main()

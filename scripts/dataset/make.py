"""Make a dataset of pages from text, JSON lines or parquet; the same as ``tplr data make``."""

import sys

from tplr.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "make", *sys.argv[1:]]))

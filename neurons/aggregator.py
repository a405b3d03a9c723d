"""Run an aggregator: the same as ``tplr aggregator``."""

import sys

from tplr.cli import main

if __name__ == "__main__":
    sys.exit(main(["aggregator", *sys.argv[1:]]))

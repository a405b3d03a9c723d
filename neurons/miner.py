"""Run a miner: the same as ``tplr miner``."""

import sys

from tplr.cli import main

if __name__ == "__main__":
    sys.exit(main(["miner", *sys.argv[1:]]))

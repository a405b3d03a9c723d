"""Run a miner: ``python neurons/miner.py --help``."""

import sys

from tplr.node.main import main
from tplr.node.miner import Miner

if __name__ == "__main__":
    sys.exit(main("miner", Miner))

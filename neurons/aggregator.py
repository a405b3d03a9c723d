"""Run an aggregator: ``python neurons/aggregator.py --help``."""

import sys

from tplr.node.aggregator import Aggregator
from tplr.node.main import main
from tplr.node.startup import prepare_aggregator

if __name__ == "__main__":
    sys.exit(main("aggregator", Aggregator, prepare=prepare_aggregator))

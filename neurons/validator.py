"""Run a validator: ``python neurons/validator.py --help``."""

import sys

from tplr.node.main import main
from tplr.node.validator import Validator

if __name__ == "__main__":
    sys.exit(main("validator", Validator))

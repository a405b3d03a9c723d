"""Run a validator: the same as ``tplr validator``."""

import sys

from tplr.cli import main

if __name__ == "__main__":
    sys.exit(main(["validator", *sys.argv[1:]]))

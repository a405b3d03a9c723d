"""Compare a dataset or a token store with its manifest; the same as ``tplr data verify``."""

import sys

from tplr.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "verify", *sys.argv[1:]]))

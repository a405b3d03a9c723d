"""Show pages of a dataset; the same as ``tplr data page``."""

import sys

from tplr.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "page", *sys.argv[1:]]))

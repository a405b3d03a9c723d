"""Try every configured bucket and key; the same as ``tplr doctor``."""

import sys

from tplr.cli import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))

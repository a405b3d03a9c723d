"""Put a dataset or a token store into the dataset bucket; the same as ``tplr data upload``."""

import sys

from tplr.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "upload", *sys.argv[1:]]))

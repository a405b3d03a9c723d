"""``python -m tplr``."""

import tplr.cli.__main__  # noqa: F401 - runs the command line

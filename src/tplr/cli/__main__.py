"""``python -m tplr.cli``."""

import sys

from tplr.cli import main

sys.exit(main())

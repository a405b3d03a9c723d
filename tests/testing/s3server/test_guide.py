"""``docs/s3server.md`` is complete, and its key file is valid."""

import json
import re
from pathlib import Path

from tplr.testing import s3server
from tplr.testing.s3server.keys import parse_keys

GUIDE = (Path(__file__).parents[3] / "docs" / "s3server.md").read_text()


def test_the_guide_names_everything_public() -> None:
    assert [name for name in s3server.__all__ if name not in GUIDE and name not in ("Faults", "Server")] == []


def test_the_key_file_of_the_guide_is_valid() -> None:
    shown = re.search(r"echo '(.*?)' > keys.json", GUIDE, re.DOTALL)
    assert shown is not None
    (key,) = parse_keys(json.loads(shown[1])).values()
    assert (key.may("write", "models"), key.may("write", "logs")) == (True, False)

"""The text of a commitment in the chain's storage; any registered hotkey determines its content."""

from collections.abc import Sequence
from typing import Any


def raw_text(fields: Sequence[Any]) -> str:
    """Return the text of the ``Raw*`` fields, with U+FFFD for bytes that are not UTF-8.

    ``fields`` are decoded ``Data`` of the pallet Commitments: a dict of variant and value, or the name of a variant
    without a value. Other variants, such as hashes and timelocked content, have no text.
    """
    raw = b""
    for field in fields:
        for variant, value in field.items() if isinstance(field, dict) else ():
            if variant.startswith("Raw") and isinstance(value, str):
                raw += bytes.fromhex(value.removeprefix("0x"))
    return raw.decode(errors="replace")

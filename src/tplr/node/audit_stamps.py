"""Audit stamps: a file with one line for each completed audit, for pages that show them."""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from tplr.errors import ConfigError


class AuditStamp(BaseModel):
    """The result of recomputing windows from buckets and chain.

    Attributes:
        first, last: the first and last window of the audit.
        validator: uid of the validator whose published work was compared.
        agrees: whether everything was equal.
        text: what was compared, or the first difference.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: int
    last: int
    validator: int
    agrees: bool
    text: str


def append_stamp(path: Path, stamp: AuditStamp) -> None:
    """Add a line. Blocks. Raises OSError."""
    with path.open("a") as file:
        file.write(f"{stamp.model_dump_json()}\n")
        file.flush()
        os.fsync(file.fileno())


def read_stamps(path: Path) -> list[AuditStamp]:
    """Read all stamps of a file, in order. Blocks. Raises ConfigError for a file of another format, and OSError."""
    try:
        return [AuditStamp.model_validate_json(line) for line in path.read_text().splitlines()]
    except (ValidationError, UnicodeError) as error:
        raise ConfigError(f"{path}: expected the stamps of tplr audit --record, a JSON object a line") from error

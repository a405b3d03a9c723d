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
    """Add a line; a line that a full disk cut off is removed. Blocks. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        content = file.read()
        end = content.rfind(b"\n") + 1
        if content.startswith(b'{"first":', end):
            file.truncate(end)
        file.write(f"{stamp.model_dump_json()}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def read_stamps(path: Path) -> list[AuditStamp]:
    """Read all stamps of a file, in order; its last line may be incomplete. Blocks.

    Raises:
        ConfigError: the file has another format.
        OSError: it can't be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")  # other ends of lines may be part of a text
        return [AuditStamp.model_validate_json(line) for line in lines[:-1]]
    except (ValidationError, UnicodeError) as error:
        raise ConfigError(f"{path}: expected the stamps of tplr audit --record, a JSON object a line") from error

"""The table of access keys: their secrets, and their rights in each bucket."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tplr.errors import ConfigError
from tplr.schemas import ACCESS_KEY_ID, BUCKET_NAME, SECRET_ACCESS_KEY
from tplr.testing.s3server.watched import WatchedJson

Right = Literal["read", "write"]
GRANTS: dict[str, frozenset[str]] = {
    "read": frozenset({"read"}),
    "write": frozenset({"write"}),
    "read-write": frozenset({"read", "write"}),
}


@dataclass(frozen=True)
class AccessKey:
    """One credential. ``rights`` maps a bucket's name to a subset of {read, write}. Requests with a temporary
    credential carry its ``session_token``."""

    secret: str = field(repr=False)
    rights: Mapping[str, frozenset[str]]
    session_token: str = field(default="", repr=False)

    def may(self, right: Right, bucket: str) -> bool:
        return right in self.rights.get(bucket, frozenset())


def parse_keys(table: Any) -> dict[str, AccessKey]:
    """``{"<access key id>": {"secret": "<64 hex>", "buckets": {"<bucket>": "read" | "write" | "read-write"}}}``.

    The entry of a temporary credential also has a ``session_token``.

    Raises:
        ConfigError: lists every problem. Secrets are not shown.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"key table: expected an object of access keys, got {type(table).__name__}")
    problems: list[str] = []
    for key_id, entry in table.items():
        where = f"key table: {key_id!r}"
        if not isinstance(key_id, str) or not ACCESS_KEY_ID.fullmatch(key_id):
            problems.append(f"{where}: an access key id is 32 characters of 0-9a-f")
        if not isinstance(entry, Mapping) or set(entry) - {"session_token"} != {"secret", "buckets"}:
            problems.append(f"{where}: expected an object with exactly 'secret' and 'buckets'")
            continue
        if not isinstance(entry["secret"], str) or not SECRET_ACCESS_KEY.fullmatch(entry["secret"]):
            problems.append(f"{where}: a secret is 64 characters of 0-9a-f")
        if not isinstance(entry.get("session_token", ""), str):
            problems.append(f"{where}: 'session_token' is a text")
        if not isinstance(entry["buckets"], Mapping):
            problems.append(f"{where}: 'buckets' is an object of bucket names")
            continue
        for bucket, grant in entry["buckets"].items():
            if not isinstance(bucket, str) or not BUCKET_NAME.fullmatch(bucket):
                problems.append(f"{where}: {bucket!r} is not a bucket name (3 to 63 of a-z, 0-9, -)")
            if not isinstance(grant, str) or grant not in GRANTS:
                problems.append(f"{where}: {bucket}: expected one of {', '.join(GRANTS)}, got {grant!r}")
    if problems:
        raise ConfigError(problems)
    return {
        key_id: AccessKey(
            entry["secret"],
            {bucket: GRANTS[grant] for bucket, grant in entry["buckets"].items()},
            entry.get("session_token", ""),
        )
        for key_id, entry in table.items()
    }


class KeyTable:
    """The keys in force: a table given by the caller, or a JSON file that is reloaded when it changes.

    Args:
        source: a table in the format of :func:`parse_keys`, or the path of a JSON file with one.
        delay: seconds until a change takes effect (the first table does at once).
        clock: seconds; only differences count.

    Raises:
        ConfigError: the first table is invalid. A later invalid table is logged, and the last valid one stays.
    """

    def __init__(
        self, source: Path | Mapping[str, Any], *, delay: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._delay = delay
        self._clock = clock
        self._coming: deque[tuple[float, dict[str, AccessKey]]] = deque()
        self._file = WatchedJson(source, parse_keys) if isinstance(source, Path) else None
        self._keys = self._file.content if self._file else parse_keys(source)

    def replace(self, table: Mapping[str, Any]) -> None:
        """Puts another table in force, after the delay."""
        self._coming.append((self._clock() + self._delay, parse_keys(table)))

    def find(self, access_key_id: str) -> AccessKey | None:
        return self._current().get(access_key_id)

    def buckets(self) -> set[str]:
        """Every bucket in which some key has a right."""
        return {bucket for key in self._current().values() for bucket in key.rights}

    def _current(self) -> dict[str, AccessKey]:
        if self._file and self._file.changed():
            self._coming.append((self._clock() + self._delay, self._file.content))
        while self._coming and self._coming[0][0] <= self._clock():
            self._keys = self._coming.popleft()[1]
        return self._keys

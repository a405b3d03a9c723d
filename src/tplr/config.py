"""What the environment says: credentials of the buckets, and where they are. Read when asked for, never at import.

Of each bucket kind ``KIND`` (``GRADIENTS``, ``AGGREGATOR``, ``DATASET``, ``CHECKPOINTS``)::

    R2_KIND_ACCOUNT_ID              R2_KIND_BUCKET_NAME             R2_KIND_JURISDICTION (default, eu or fedramp)
    R2_KIND_READ_ACCESS_KEY_ID      R2_KIND_READ_SECRET_ACCESS_KEY
    R2_KIND_WRITE_ACCESS_KEY_ID     R2_KIND_WRITE_SECRET_ACCESS_KEY

Only ``GRADIENTS`` must have write credentials. Without any ``R2_CHECKPOINTS_`` variable, checkpoints lie in the
gradients bucket; an empty variable is none. ``R2_DATASET_BUCKET_LIST`` takes the place of the other ``R2_DATASET_``
variables: a JSON list of replicas, each in the shape that ``BUCKET_SECRETS`` shows. A ``.env`` file in the working
directory, or above it, gives what the environment itself does not.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dotenv import dotenv_values, find_dotenv

from tplr.errors import ConfigError
from tplr.schemas import ACCESS_KEY_ID, ACCOUNT_ID, BUCKET_NAME, SECRET_ACCESS_KEY, Bucket

Kind = Literal["gradients", "aggregator", "dataset", "checkpoints"]
Access = Literal["read", "write"]
KINDS: tuple[Kind, ...] = ("gradients", "aggregator", "dataset", "checkpoints")
MUST_WRITE: tuple[Kind, ...] = ("gradients",)

DATASET_SUBFOLDER = "HuggingFaceFW_fineweb-edu-score-2"

_HEX32, _HEX64 = "32 characters of 0-9a-f", "64 characters of 0-9a-f"
# Place of a value in a bucket's record -> the end of its variable's name, what it must match, and that in words.
_PARTS: dict[tuple[str, ...], tuple[str, re.Pattern[str], str]] = {
    ("account_id",): ("ACCOUNT_ID", ACCOUNT_ID, _HEX32),
    ("name",): ("BUCKET_NAME", BUCKET_NAME, "3 to 63 of a-z, 0-9, -"),
    ("jurisdiction",): ("JURISDICTION", re.compile("default|eu|fedramp"), "default, eu or fedramp"),
    ("credentials", "read", "access_key_id"): ("READ_ACCESS_KEY_ID", ACCESS_KEY_ID, _HEX32),
    ("credentials", "read", "secret_access_key"): ("READ_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY, _HEX64),
    ("credentials", "write", "access_key_id"): ("WRITE_ACCESS_KEY_ID", ACCESS_KEY_ID, _HEX32),
    ("credentials", "write", "secret_access_key"): ("WRITE_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY, _HEX64),
}


class Secret(str):
    """Half of a credential: a string whose ``repr`` does not show it, so printing a record of them is harmless."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class BucketSecrets(Mapping[str, dict[str, Any]]):
    """Kind of bucket -> ``{"account_id", "name", "credentials": {"read": {"access_key_id", "secret_access_key"},
    "write": {...}}}``, or ``{"multiple": [...]}`` of such records for a dataset with replicas.

    A kind is checked when it is asked for: a node that trains on local text needs no dataset bucket.

    Raises:
        ConfigError: variables of that kind are missing or malformed; all of them at once, without their values.
    """

    def __init__(self, environment: Callable[[], Mapping[str, str]]) -> None:
        self._environment = environment

    def __getitem__(self, kind: str) -> dict[str, Any]:
        if kind not in KINDS:
            raise KeyError(kind)
        env = self._environment()
        if kind == "checkpoints" and not is_configured("checkpoints", env):
            kind = "gradients"
        problems: list[str] = []
        if kind == "dataset" and env.get("R2_DATASET_BUCKET_LIST"):
            secrets: dict[str, Any] = {"multiple": _replicas(env["R2_DATASET_BUCKET_LIST"], problems)}
        else:
            prefix = f"R2_{kind.upper()}_"
            given = {place: env.get(prefix + suffix, "") for place, (suffix, *_) in _PARTS.items()}
            names = {place: prefix + suffix for place, (suffix, *_) in _PARTS.items()}
            secrets = _checked(given, names, must_write=kind in MUST_WRITE, problems=problems)
        if problems:
            raise ConfigError([f"{kind} bucket: {problem}" for problem in problems])
        return secrets

    def __contains__(self, kind: object) -> bool:
        return kind in KINDS

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(KINDS)})"


def process_environment() -> dict[str, str]:
    """Variables of this process, over those of the nearest ``.env`` file. Raises ConfigError if that is no text."""
    path = find_dotenv(usecwd=True)
    try:
        dotenv = {name: value for name, value in dotenv_values(path).items() if value is not None}
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path}: expected a readable file in UTF-8, got {type(error).__name__}") from None
    return {**dotenv, **os.environ}


def load_bucket_secrets(env: Mapping[str, str] | None = None) -> BucketSecrets:
    """Secrets of all buckets in ``env``, or in this process's environment. See ``BucketSecrets``."""
    return BucketSecrets(process_environment if env is None else lambda: env)


BUCKET_SECRETS = load_bucket_secrets()


def is_configured(kind: Kind, env: Mapping[str, str]) -> bool:
    """Whether any ``R2_{KIND}_*`` is set; an empty one, as in a copy of ``.env.example``, is not."""
    return any(name.startswith(f"R2_{kind.upper()}_") and value for name, value in env.items())


def buckets_for(kind: Kind, access: Access, secrets: Mapping[str, dict[str, Any]] | None = None) -> tuple[Bucket, ...]:
    """Buckets of a kind with their credentials for reading or writing; more than one if the dataset has replicas.

    Raises:
        ConfigError: as ``BucketSecrets``, or there are no credentials for writing.
    """
    record = (BUCKET_SECRETS if secrets is None else secrets)[kind]
    records = record.get("multiple", [record])
    if any(access not in one["credentials"] for one in records):
        raise ConfigError(
            f"{kind} bucket: set R2_{kind.upper()}_{access.upper()}_ACCESS_KEY_ID and _SECRET_ACCESS_KEY to {access} it"
        )
    return tuple(
        Bucket(
            name=one["name"],
            account_id=one["account_id"],
            jurisdiction=one.get("jurisdiction", "default"),
            **one["credentials"][access],
        )
        for one in records
    )


def bucket_for(kind: Kind, access: Access, secrets: Mapping[str, dict[str, Any]] | None = None) -> Bucket:
    """The bucket of a kind; the first of its replicas. Raises as ``buckets_for``."""
    return buckets_for(kind, access, secrets)[0]


def optional_bucket(kind: Kind, env: Mapping[str, str] | None = None) -> Bucket | None:
    """The bucket of ``R2_{KIND}_*``, with the key that writes if there is one; None if none of these is set.

    Raises:
        ConfigError: as ``BucketSecrets``.
    """
    given = process_environment() if env is None else env
    if not is_configured(kind, given):
        return None
    secrets = load_bucket_secrets(given)
    return bucket_for(kind, "write" if "write" in secrets[kind]["credentials"] else "read", secrets)


def endpoint_override(env: Mapping[str, str] | None = None) -> str | None:
    """``TPLR_S3_ENDPOINT``: another S3-compatible server for all buckets, as ``http://127.0.0.1:9000``; None for R2.

    Raises:
        ConfigError: it is no such address.
    """
    value = (process_environment() if env is None else env).get("TPLR_S3_ENDPOINT", "")
    return checked_endpoint(value, "TPLR_S3_ENDPOINT") if value else None


def checked_endpoint(value: str, name: str) -> str:
    """``http(s)://host[:port]``, without a slash at its end. Raises ConfigError, which shows ``name`` alone."""
    fits = re.fullmatch(r"https?://([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::([0-9]{1,5}))?/?", value)
    if not fits or not 0 < int(fits[2] or 1) < 2**16:
        raise ConfigError(f"{name}: expected http(s)://host[:port], without user, path or query")
    return value.rstrip("/")


def dataset_subfolder(env: Mapping[str, str] | None = None, *, default: str = DATASET_SUBFOLDER) -> str:
    """``TPLR_DATASET_SUBFOLDER``: where the dataset lies in its bucket.

    Raises:
        ConfigError: it is no path of plain names.
    """
    value = (process_environment() if env is None else env).get("TPLR_DATASET_SUBFOLDER", "") or default
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", value, re.ASCII):
        raise ConfigError(
            f"TPLR_DATASET_SUBFOLDER is {value!r}: expected names of letters, digits, ., _, - and / between"
        )
    return value


def cache_folder(env: Mapping[str, str] | None = None) -> Path:
    """``TPLR_CACHE_FOLDER``: where this machine keeps what it can fetch again; ``~/.cache/tplr`` without it."""
    value = (process_environment() if env is None else env).get("TPLR_CACHE_FOLDER", "") or "~/.cache/tplr"
    return Path(value).expanduser()


def _replicas(text: str, problems: list[str]) -> list[dict[str, Any]]:
    """Records of ``R2_DATASET_BUCKET_LIST``; what is wrong with it goes to ``problems``."""
    name = "R2_DATASET_BUCKET_LIST"
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        problems.append(f"{name} is not JSON")  # the parser's own message would quote it
        return []
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        problems.append(f"{name}: expected a list of one or more objects")
        return []
    return [
        _checked(
            {place: _at(entry, place) for place in _PARTS},
            {place: f"{name}[{i}].{'.'.join(place)}" for place in _PARTS},
            must_write=False,
            problems=problems,
        )
        for i, entry in enumerate(entries)
    ]


def _at(entry: Any, place: tuple[str, ...]) -> object:
    for step in place:
        entry = entry.get(step, "") if isinstance(entry, dict) else ""
    return entry


def _checked(
    given: Mapping[tuple[str, ...], object],
    names: Mapping[tuple[str, ...], str],
    *,
    must_write: bool,
    problems: list[str],
) -> dict[str, Any]:
    """A bucket's record of the values given; what is wrong goes to ``problems``, never with the value itself."""
    writes = must_write or any(value for place, value in given.items() if "write" in place)
    record: dict[str, Any] = {}
    for place, (_, pattern, expected) in _PARTS.items():
        value = given[place]
        if not value:
            if place != ("jurisdiction",) and (writes or "write" not in place):
                problems.append(f"{names[place]} is missing: expected {expected}")
        elif not isinstance(value, str) or not pattern.fullmatch(value):
            length = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
            problems.append(f"{names[place]}: expected {expected}, got {length} that do not match")
        else:
            inner = record
            for step in place[:-1]:
                inner = inner.setdefault(step, {})
            inner[place[-1]] = Secret(value) if "credentials" in place else value
    return record
